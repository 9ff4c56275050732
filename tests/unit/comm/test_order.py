"""SequenceNumbers: numbers without gaps, one order that all members share, and a lock that dies
with its holder.
"""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from graphlib import TopologicalSorter
from itertools import combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.comm.order import SequenceNumbers
from harness.examples import examples

ROOT = Path(__file__).parents[3]
ENGINES = 4
Taken = list[tuple[tuple[int, ...], list[int]]]


class Taker:
    """A process that takes numbers (see takers.py)."""

    def __init__(self, path: str, what: str, seed: int = 0) -> None:
        command = [sys.executable, "-m", "tests.unit.comm.takers", path, what, str(seed)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def heard(self) -> Any:
        """Return the next thing it says."""
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def go(self) -> None:
        """Let it take fifty numbers."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Make an end of it."""
        self.process.kill()
        self.process.communicate()


def take_together(path: str, processes: int, rounds: int, what: str) -> list[Taken]:
    """Let several processes take numbers at the same time, fifty in each round; return what each
    took.
    """
    with ExitStack() as stack:
        takers = [stack.enter_context(Taker(path, what, seed)) for seed in range(processes)]
        assert [taker.heard() for taker in takers] == ["ready"] * processes
        taken: list[Taken] = [[] for _ in takers]
        for _ in range(rounds):
            for taker in takers:
                taker.go()
            for taker, mine in zip(takers, taken, strict=True):
                mine += [(tuple(members), numbers) for members, numbers in taker.heard()]
    return taken


def check_one_order(taken: Taken, first: int = 0) -> None:
    """Assert what members rely on: no gap, and an order of all messages that each member's numbers
    agree with.
    """
    of_member: dict[int, dict[int, int]] = {member: {} for member in range(ENGINES)}
    for message, (members, numbers) in enumerate(taken):
        for member, number in zip(members, numbers, strict=True):
            assert number not in of_member[member], "a number was given twice"
            of_member[member][number] = message
    after: dict[int, set[int]] = {message: set() for message in range(len(taken))}
    for of_number in of_member.values():
        numbers = sorted(of_number)
        assert numbers == list(range(first, first + len(numbers)))
        for earlier, later in pairwise(numbers):
            after[of_number[later]].add(of_number[earlier])
    assert len(list(TopologicalSorter(after).static_order())) == len(taken)  # raises CycleError
    for (one, a), (other, b) in combinations(taken[:: max(1, len(taken) // 300)], 2):
        common = set(one) & set(other)
        assert len({a[one.index(m)] < b[other.index(m)] for m in common}) <= 1


@pytest.mark.parametrize("what", ["nested", "any"])
def test_processes_that_take_at_the_same_time_share_one_order(path: str, what: str) -> None:
    """Four leaders of nested groups, and four processes that name any members in any order."""
    taken = take_together(path, 4, 30, what)
    assert all(len(mine) == 1500 for mine in taken)
    check_one_order([message for mine in taken for message in mine])
    for mine in taken:
        for member in range(ENGINES):
            numbers = [
                numbers[members.index(member)] for members, numbers in mine if member in members
            ]
            assert numbers == sorted(numbers)
            # others' lie between
            assert numbers != list(range(numbers[0], numbers[0] + len(numbers)))


@settings(max_examples=examples(50), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.permutations(range(ENGINES)), st.integers(1, ENGINES)),
        max_size=40,
    )
)
def test_sequence_numbers_count_up_in_any_order_of_takes(
    takes: list[tuple[int, list[int], int]],
) -> None:
    """Each member's numbers count up from 0, whichever of three openings of the file they are taken
    through.
    """
    with TemporaryDirectory(dir="/dev/shm") as directory:
        orders = [SequenceNumbers(f"{directory}/order", ENGINES) for _ in range(3)]
        expected = [0] * ENGINES
        for opening, members, count in takes:
            numbers = orders[opening].take(opening, members[:count])
            assert numbers == [expected[m] for m in members[:count]]
            for member in members[:count]:
                expected[member] += 1
        for order in orders:
            order.close()


def test_a_killed_holder_releases_the_lock(path: str) -> None:
    """Others wait while it lives, and go on at once when it is killed, where it left off."""
    order = SequenceNumbers(path, ENGINES)
    with Taker(path, "hold") as holder, ThreadPoolExecutor(1) as pool:
        assert holder.heard() == "held"
        waiter = pool.submit(order.take, 0, [1, 2])
        time.sleep(0.2)
        assert not waiter.done()
        holder.process.kill()
        assert waiter.result(timeout=10) == [1, 0]
    order.close()


def test_others_see_that_an_engine_has_died(path: str) -> None:
    """As soon as its process has ended, whichever way; and that it lives again when it is started
    again.
    """
    order = SequenceNumbers(path, ENGINES)
    for _ in range(2):
        with Taker(path, "join") as engine:
            assert engine.heard() == "joined"
            assert not order.is_gone(3)
        assert order.is_gone(3)
    order.close()


def test_an_error_inside_does_not_keep_the_lock(path: str) -> None:
    """A member that does not exist raises, and the next take goes on as if nothing had been."""
    orders = [SequenceNumbers(path, ENGINES) for _ in range(2)]
    with pytest.raises(IndexError):
        orders[0].take(0, [0, 10**6])
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(orders[1].take, 0, [0, 1]).result(timeout=10) == [0, 0]
    for order in orders:
        order.close()


def test_reopened_file_goes_on_and_leaves_no_descriptor(path: str) -> None:
    """An engine that opens it later sees the same numbers; closing gives back the descriptor and
    the map.
    """
    before = len(os.listdir("/proc/self/fd"))
    first = SequenceNumbers(path, ENGINES)
    assert first.take(2, [3, 0]) == [0, 0]
    first.close()
    second = SequenceNumbers(path, ENGINES)
    assert second.take(1, [0, 1, 2, 3]) == [1, 0, 0, 1]
    assert [second.sender(3, number) for number in (0, 1)] == [2, 1]
    second.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert path not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert Path(path).stat().st_mode & 0o777 == 0o600
