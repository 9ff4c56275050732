"""Units of weights that record what is dropped and fetched back."""

from collections.abc import Callable
from typing import NamedTuple

from flying_serving.weights.units import Units


class Change(NamedTuple):
    """A piece of weights that was dropped or fetched back: its layer, and its bytes."""

    layer: str
    size_bytes: int


class Recorded:
    """The `Units` of a layer, which note in `changes` what is dropped and fetched back."""

    def __init__(self, layer: str, units: Units, changes: list[Change]) -> None:
        self._layer = layer
        self._units = units
        self._changes = changes

    def lendable(self, rank: int, degree: int) -> int:
        return self._units.lendable(rank, degree)

    def drop(self, rank: int, degree: int) -> int:
        return self._note(self._units.drop(rank, degree))

    def fetch(self) -> int:
        return self._note(self._units.fetch())

    def _note(self, size_bytes: int) -> int:
        self._changes.append(Change(self._layer, size_bytes))
        return size_bytes


def until_none_changes(change_next: Callable[[], None], changes: list[Change]) -> list[Change]:
    """Call `change_next` until it records no change any more; return the recorded ones."""
    first, before = len(changes), -1
    while len(changes) > before:
        before = len(changes)
        change_next()
    return changes[first:]
