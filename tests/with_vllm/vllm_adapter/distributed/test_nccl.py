"""NcclGroup and the watchdog, over vLLM's PyNcclCommunicator and a stand-in for NCCL's library."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from flying_serving.comm.pool import CommunicatorPool
from flying_serving.comm.watchdog import Watchdog
from flying_serving.errors import CollectiveTimeout, EngineLost, Unsupported
from flying_serving.vllm_adapter.distributed.coordinator import LaneCoordinator
from flying_serving.vllm_adapter.distributed.nccl import NcclGroup, NcclMember
from tests.with_vllm.vllm_adapter.nccl_library import ThreadsNccl, install

CPU = torch.device("cpu")
ANSWER_S = 30.0
"""Longest wait for a thread: no test takes as long. Also a deadline, by the clock of a test."""
WAIT_S = 40
"""A deadline of which a test counts the seconds."""
NAMES = ["engine 0", "engine 1"]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ThreadsNccl:
    return install(monkeypatch)


class Clock:
    """The seconds of a test, of which `tick_s` pass at each look."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s, self.tick_s = 100.0, tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


class Engines:
    """Engines of one device in threads of this process, each with the pool of its worker."""

    def __init__(self, engines: int, directory: str) -> None:
        self.lost: set[int] = set()
        self.directory = directory
        self.clock = Clock()
        self._engines = engines
        self.threads = ThreadPoolExecutor(engines)
        self.pools = [self.pool(engine) for engine in range(engines)]

    def pool(self, engine: int) -> CommunicatorPool:
        """Return the pool of an engine that has started."""
        pool = CommunicatorPool(
            engine,
            0,
            engines=self._engines,
            devices=1,
            sizes=[size for size in (2, 4) if size <= self._engines],
            make=lambda ranks, name: LaneCoordinator(engine, ranks, name, 0, collectives="pynccl"),
            activate=nullcontext,
        )
        watchdog = Watchdog(self.lost.__contains__)
        member = NcclMember(engine, CPU, ANSWER_S, watchdog, self.clock)
        pool.use_ends(self.directory, member.open_end)
        return pool

    def start(self, engines: range, call: Callable[[CommunicatorPool], Any]) -> list[Future[Any]]:
        """Begin a call of some engines' pools at the same time."""
        return [self.threads.submit(call, self.pools[engine]) for engine in engines]

    def all(self, call: Callable[[CommunicatorPool], Any]) -> list[Any]:
        """Return the answers of all engines' pools."""
        futures = self.start(range(self._engines), call)
        return [future.result(ANSWER_S) for future in futures]


@pytest.fixture
def engines(library: ThreadsNccl) -> Iterator[Engines]:
    with TemporaryDirectory(dir="/dev/shm") as directory:
        made = Engines(2, directory)
        yield made
        for pool in made.pools:
            pool.close()
        made.threads.shutdown()


def total(pool: CommunicatorPool) -> list[float]:
    """Sum [1, 2] over the group of two, and require that the group is whole."""
    summed = pool.coordinator(2).all_reduce(torch.tensor([1.0, 2.0]))
    pool.require_whole(2)
    return summed.tolist()


def test_engines_sum_once_all_have_come(engines: Engines) -> None:
    engines.all(lambda pool: pool.reopen(2, (0, 0)))
    engines.all(lambda pool: pool.warm())
    assert engines.all(total) == [[2.0, 4.0]] * 2
    assert os.listdir(engines.directory) == ["lane2-0-0.0"]


CALLS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], list[Any]]] = {
    "all_reduce": (lambda group, x: group.all_reduce(x), [[[3, 5]], [[3, 5]]]),
    "all_gather": (lambda group, x: group.all_gather(x), [[[1, 2, 2, 3]], [[1, 2, 2, 3]]]),
    "all_gather of rows": (
        lambda group, x: group.all_gather(x, 0),
        [[[1, 2], [2, 3]], [[1, 2], [2, 3]]],
    ),
    "gather": (lambda group, x: group.gather(x, 1), [None, [[1, 2, 2, 3]]]),
    "broadcast": (lambda group, x: group.broadcast(x, 1), [[[2, 3]], [[2, 3]]]),
    "all_to_all": (lambda group, x: group.all_to_all(x.t()), [[[1], [2]], [[2], [3]]]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", CALLS)
def test_all_ranks_of_a_group_get_tensors(engines: Engines, name: str, dtype: torch.dtype) -> None:
    """Rank r brings [[r + 1, r + 2]], whose elements are apart in memory."""
    call, expected = CALLS[name]

    def run(pool: CommunicatorPool) -> Any:
        group = pool.coordinator(2)
        whole = torch.zeros(1, 4, dtype=dtype)
        x = whole[:, ::2]
        x.copy_(torch.tensor([[group.rank + 1, group.rank + 2]]))
        result = call(group, x)
        return None if result is None else result.tolist()

    engines.all(lambda pool: pool.reopen(2, (0, 0)))
    assert engines.all(run) == expected


def test_lost_member_ends_the_collective_that_waits_for_it(
    engines: Engines, library: ThreadsNccl
) -> None:
    """NCCL itself would wait without end."""
    engines.all(lambda pool: pool.reopen(2, (0, 0)))
    engines.all(lambda pool: pool.warm())
    (waiting,) = engines.start(range(1), total)
    time.sleep(0.1)
    assert not waiting.done()
    engines.lost.add(1)
    with pytest.raises(EngineLost, match=r"^group lane2-0-0\.0: engine 1 is lost$"):
        waiting.result(ANSWER_S)
    assert 0 in library.aborted


def test_step_of_a_group_that_was_aborted_later_is_void(engines: Engines) -> None:
    """A collective may be queued before the loss, and wait on the device after it."""
    engines.all(lambda pool: pool.reopen(2, (0, 0)))
    assert engines.all(total) == [[2.0, 4.0]] * 2
    pool = engines.pools[0]
    engines.lost.add(1)
    deadline_s = time.monotonic() + ANSWER_S
    with pytest.raises(EngineLost, match="engine 1 is lost"):
        while time.monotonic() < deadline_s:
            pool.require_whole(2)
            time.sleep(0.01)


def test_member_that_lives_and_is_late_ends_the_collective(engines: Engines) -> None:
    """As one that hangs: the engine that has waited ends, and is started again."""
    engines.all(lambda pool: pool.reopen(2, (0, 0)))
    engines.all(lambda pool: pool.warm())
    engines.clock.tick_s = 1.0
    (waiting,) = engines.start(range(1), total)
    with pytest.raises(CollectiveTimeout, match=r"waited .* s for one of engine 1 device 0$"):
        waiting.result(ANSWER_S)


def queue_step(groups: list[NcclGroup]) -> None:
    """Let all ranks queue a collective."""
    with ThreadPoolExecutor(2) as threads:
        queued = [threads.submit(group.all_reduce, torch.ones(1)) for group in groups]
        for waiting in queued:
            waiting.result(ANSWER_S)


def overdue_within(group: NcclGroup, clock: Clock, seconds: int) -> list[str | None]:
    """Let time pass. Return what the group says each second."""
    said = []
    for _ in range(seconds):
        clock.now_s += 1
        said.append(group.overdue())
    return said


def test_group_that_is_idle_is_never_late(library: ThreadsNccl, tmp_path: Path) -> None:
    """Its next step has the whole time."""
    clock = Clock()
    groups = unwatched(tmp_path / "group", clock)
    queue_step(groups)
    assert overdue_within(groups[0], clock, WAIT_S) == [None] * WAIT_S
    groups[0].require_whole()
    assert overdue_within(groups[0], clock, 2 * WAIT_S) == [None] * 2 * WAIT_S
    queue_step(groups)
    assert overdue_within(groups[0], clock, WAIT_S) == [None] * WAIT_S
    for group in groups:
        group.close()


def test_deadline_of_a_step_beside_another_begins_with_its_end(
    library: ThreadsNccl, tmp_path: Path
) -> None:
    """The device comes to its collectives only then."""
    clock = Clock()
    groups = unwatched(tmp_path / "group", clock)
    for _ in range(2):  # two steps are queued
        queue_step(groups)
    assert overdue_within(groups[0], clock, WAIT_S) == [None] * WAIT_S
    groups[0].require_whole(goes_on=True)
    said = overdue_within(groups[0], clock, WAIT_S + 1)
    assert said == [None] * WAIT_S + [f"waited {WAIT_S + 1}.0 s for one of engine 1"]
    for group in groups:
        group.close()


def test_group_is_whole_again_with_the_next_incarnation(engines: Engines) -> None:
    """By the calls that an engine's membership makes for shared memory."""
    engines.all(lambda pool: pool.reopen(2, (0, 0)))
    for incarnation in (1, 2, 3):
        engines.all(lambda pool: pool.warm())
        assert engines.all(total) == [[2.0, 4.0]] * 2
        engines.lost.add(1)
        engines.pools[1].close()
        engines.pools[0].leave(2)
        with pytest.raises(EngineLost, match=r"group lane2 of ranks \[0, 1\] is not whole"):
            total(engines.pools[0])
        engines.pools[1] = engines.pool(1)
        engines.pools[1].reopen(2, (0, incarnation))  # it waits for no other engine
        engines.lost.remove(1)
        engines.pools[0].reopen(2, (0, incarnation))
    assert engines.all(total) == [[2.0, 4.0]] * 2
    assert os.listdir(engines.directory) == ["lane2-0-0.3"]


def test_member_that_is_lost_before_it_has_come_is_not_waited_for(engines: Engines) -> None:
    engines.pools[0].reopen(2, (0, 0))
    (waiting,) = engines.start(range(1), total)
    time.sleep(0.1)
    assert not waiting.done()
    engines.lost.add(1)
    with pytest.raises(EngineLost, match="engine 1 is lost"):
        waiting.result(ANSWER_S)


def group_of(path: Path, rank: int, tick_s: float = 0.0) -> NcclGroup:
    """Return a rank's end of a group of engines 0 and 1. `tick_s`: of its clock."""
    member = NcclMember(rank, CPU, ANSWER_S, Watchdog(lambda engine: False), Clock(tick_s))
    return member.open_end(str(path), rank, (0, 1), NAMES)


def unwatched(path: Path, clock: Clock) -> list[NcclGroup]:
    """Return all ends of that group, with a deadline of WAIT_S: only the test looks at them."""
    watchdog = Watchdog(lambda engine: False)
    members = [NcclMember(rank, CPU, WAIT_S, watchdog, clock) for rank in range(2)]
    return [NcclGroup(str(path), rank, NAMES, member) for rank, member in enumerate(members)]


def test_member_that_does_not_come_in_time_is_named(library: ThreadsNccl, tmp_path: Path) -> None:
    group = group_of(tmp_path / "group", 0, tick_s=1.0)
    with pytest.raises(CollectiveTimeout, match=r"^connecting group: waited .* for engine 1$"):
        group.all_reduce(torch.ones(1))
    group.close()


@pytest.mark.parametrize("function", ["ncclSend", "ncclGroupEnd"])
def test_failed_exchange_leaves_no_group_of_calls_open(
    library: ThreadsNccl, tmp_path: Path, function: str
) -> None:
    """NCCL would keep the thread's later calls, of other groups too, until the group ends."""
    groups = [group_of(tmp_path / "group", rank) for rank in range(2)]

    def run(group: NcclGroup) -> bool:
        group.barrier(ANSWER_S)
        library.failing.add(function)
        with pytest.raises(EngineLost, match=r"^all_to_all of group: NCCL error: remote process"):
            group.all_to_all(torch.ones(2, 3))
        return library.group_is_open

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, groups)) == [False, False]
    for group in groups:
        group.close()


def test_exchange_needs_a_part_for_each_rank(library: ThreadsNccl, tmp_path: Path) -> None:
    group = group_of(tmp_path / "group", 0)
    with pytest.raises(ValueError, match=r"^all_to_all of \(3, 1\): .* each of 2 ranks$"):
        group.all_to_all(torch.ones(3, 1))
    group.close()


@pytest.mark.parametrize("function", ["ncclCommInitRank", "ncclAllReduce"])
def test_error_of_nccl_is_a_lost_engine(
    library: ThreadsNccl, tmp_path: Path, function: str
) -> None:
    """The API server says which one: its notice of the loss may come later than NCCL's error."""
    library.failing.add(function)
    groups = [group_of(tmp_path / "group", rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        sums = [threads.submit(group.all_reduce, torch.ones(1)) for group in groups]
        for waiting in sums:
            with pytest.raises(EngineLost, match="NCCL error: remote process exited"):
                waiting.result(ANSWER_S)
    for group in groups:
        group.close()


def test_machine_without_nccl_is_refused_by_the_setting(tmp_path: Path) -> None:
    """As this one, where no stand-in is installed."""
    groups = [group_of(tmp_path / "group", rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for waiting in [threads.submit(group.barrier, ANSWER_S) for group in groups]:
            with pytest.raises(Unsupported, match=r"^--cuda-collectives=pynccl: vLLM cannot load"):
                waiting.result(ANSWER_S)
    for group in groups:
        group.close()


def test_closed_group_takes_no_collective(library: ThreadsNccl, tmp_path: Path) -> None:
    group = group_of(tmp_path / "group", 0)
    group.close()
    group.close()
    with pytest.raises(EngineLost, match=r"^group group: closed$"):
        group.broadcast(torch.ones(1), 0)
