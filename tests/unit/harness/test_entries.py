"""What an object holds is found wherever it is held, and counted once."""

from collections import deque
from dataclasses import dataclass, field

import pytest

from harness.entries import entries


@dataclass
class Plain:
    held: object = None


@dataclass(slots=True)
class Slotted:
    held: object = None


class Below(Slotted):
    pass


@dataclass
class Ring:
    others: list[object] = field(default_factory=list)


@pytest.mark.parametrize("kind", [Plain, Slotted, Below])
@pytest.mark.parametrize("held", [{1: 2, 3: 4}, [1, 2], {1, 2}, (1, 2), deque([1, 2])])
def test_entries_are_found_behind_attributes(kind: type[Plain], held: object) -> None:
    assert entries(kind(kind(held))) == 2


def test_what_is_held_twice_or_in_a_ring_counts_once() -> None:
    ring, shared = Ring(), [1, 2, 3]
    ring.others += [ring, shared, {"also": shared}]
    assert entries(ring) == 3 + 3 + 1
