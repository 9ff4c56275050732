"""EmulatedLink: the group's own results, later by latency and bytes over bandwidth, for each kind
of collective.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import emulated_link as link
from benchmarks.emulated_link import SPIN_S, EmulatedLink
from flying_serving.comm import pool
from flying_serving.comm.communicator import GroupCommunicator
from flying_serving.comm.pool import CommunicatorPool


class Clock:
    """Time as `link` sees it: it passes by sleeping, and a little by each look at it."""

    READ_S = 1e-6

    def __init__(self, oversleep_s: float = 0.0) -> None:
        self.now = 50.0
        self.slept: list[float] = []
        self._oversleep_s = oversleep_s

    def perf_counter(self) -> float:
        """Look at the clock."""
        self.now += self.READ_S
        return self.now

    def sleep(self, seconds: float) -> None:
        """Sleep a little longer than asked."""
        self.slept.append(seconds)
        self.now += seconds + self._oversleep_s


class Group:
    """Remembers what it was asked, and returns something else each time."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def collective(*args: Any) -> Any:
            self.asked.append((name, *args))
            return f"result {len(self.asked)}"

        return collective


CALLS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "all_reduce": lambda group, x: group.all_reduce(x),
    "all_gather": lambda group, x: group.all_gather(x, 1),
    "gather": lambda group, x: group.gather(x, 1, 0),
    "broadcast": lambda group, x: group.broadcast(x, 0),
    "all_to_all": lambda group, x: group.all_to_all(x),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("oversleep_s", [0.0, 60e-6])
@pytest.mark.parametrize(
    ("latency_us", "gb_per_s", "extra_s"), [(200, 5, 201.6e-6), (0, 1, 8e-6), (30, 1e6, 30e-6)]
)
def test_each_collective_is_the_groups_and_takes_so_much_longer(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    oversleep_s: float,
    latency_us: float,
    gb_per_s: float,
    extra_s: float,
) -> None:
    """Also if a sleep ends late: the pause ends on time, and all but its last part is slept."""
    clock, group, x = Clock(oversleep_s), Group(), torch.zeros(20, 50, dtype=torch.float64)
    monkeypatch.setattr(link, "time", clock)
    began = clock.now
    assert CALLS[name](EmulatedLink(group, latency_us, gb_per_s), x) == "result 1"
    assert clock.now - began == pytest.approx(extra_s, abs=3 * Clock.READ_S)
    assert clock.slept == ([pytest.approx(extra_s - SPIN_S)] if extra_s > SPIN_S else [])
    direct = Group()
    CALLS[name](direct, x)
    assert [asked[0] for asked in group.asked] == [name]
    assert group.asked[0][1] is x
    assert group.asked[0][2:] == direct.asked[0][2:]


@given(
    st.floats(0, 1e6),
    st.floats(1e-3, 1e6),
    st.lists(st.integers(0, 30), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
def test_collective_costs_latency_plus_bytes_over_bandwidth(
    latency_us: float, gb_per_s: float, shape: list[int], dtype: torch.dtype
) -> None:
    """Microseconds, and the tensor's bytes over 10^9 bytes a second."""
    x = torch.zeros(shape, dtype=dtype)
    nbytes = x.numel() * x.element_size()
    expected = latency_us / 1e6 + nbytes / (gb_per_s * 1e9)
    assert EmulatedLink(Group(), latency_us, gb_per_s).pause_s(x) == pytest.approx(expected)


def test_only_groups_of_more_than_one_engine_are_slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of one engine exchange as ever."""
    made: dict[str, Any] = {}

    def make(partition: list[list[int]], name: str) -> Any:
        size = len(partition[0])
        return SimpleNamespace(
            rank_in_group=0, world_size=size, device_communicator=GroupCommunicator(name)
        )

    def shm(path: str, *_: Any, **__: Any) -> Any:
        made[path.rsplit("/", 1)[1]] = group = Group()
        return group

    monkeypatch.setattr(pool, "ShmGroup", shm)
    # undone afterwards
    monkeypatch.setattr(CommunicatorPool, "use_shared_memory", CommunicatorPool.use_shared_memory)
    link.slow(0.0, 1e6)
    communicators = CommunicatorPool(
        0,
        0,
        engines=4,
        devices=2,
        sizes=(1, 2, 4),
        make=make,
        activate=lambda coordinator: coordinator,
    )
    # as worker/worker.py calls it
    communicators.use_shared_memory("/nowhere", 1.0)
    for size in (1, 2, 4):
        communicators.reopen(size, (0,) * size)
    files = {
        1: ["lane1-0-0"],
        2: ["lane2-0-0.0", "lane2-0-0.0-device0"],
        4: ["lane4-0-0.0.0.0", "lane4-0-0.0.0.0-device0"],
    }
    assert sorted(made) == sorted(file for names in files.values() for file in names)
    for size, names in files.items():
        for file, coordinator in zip(names, communicators.coordinators(size), strict=True):
            communicator = coordinator.device_communicator
            for name, call in CALLS.items():
                slowed = getattr(communicator, name).__qualname__.startswith("EmulatedLink")
                assert slowed is (size > 1)
                call(communicator, torch.zeros(2))
            assert [asked[0] for asked in made[file].asked] == list(CALLS)
