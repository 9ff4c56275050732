"""CommunicatorPool over shared memory: a member dies, is started again, and the group sums right as
before.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from flying_serving.comm.pool import CommunicatorPool
from flying_serving.errors import EngineLost
from flying_serving.layout.groups import world_rank
from flying_serving.vllm_adapter.distributed.coordinator import LaneCoordinator

CONTEXT = get_context("forkserver")  # as spawn, but one process imports vLLM for all
CONTEXT.set_forkserver_preload(
    ["flying_serving.comm.pool", "flying_serving.vllm_adapter.distributed.coordinator"]
)
ANSWER_S = 60.0
"""Longest wait for a process: no test takes as long."""


def pool_of(
    engine: int, device: int, engines: int, devices: int, directory: str
) -> CommunicatorPool:
    """The pool of a worker, without any file yet; of the groups of 1, 2, ... engines that have
    several ranks.
    """
    rank = world_rank(engine, device, engines)
    pool = CommunicatorPool(
        engine,
        device,
        engines=engines,
        devices=devices,
        sizes=[size for size in (1, 2, 4) if size * devices > 1 and size <= engines],
        make=lambda ranks, name: LaneCoordinator(rank, ranks, name, device),
        activate=nullcontext,
    )
    pool.use_shared_memory(directory, ANSWER_S)
    return pool


def work(directory: str, place: tuple[int, int, int, int], end: Connection) -> None:
    """Do as told until told nothing: call the pool, or sum 2 ** rank in the group of a size."""
    torch.set_num_threads(1)
    pool = pool_of(*place, directory)
    while (told := end.recv()) is not None:
        name, *args = told
        try:
            if name == "sum":
                coordinator = pool.coordinator(*args)
                end.send(int(coordinator.all_reduce(torch.tensor([2**coordinator.rank])).item()))
            else:
                end.send(getattr(pool, name)(*args))
        except EngineLost as error:
            end.send(str(error))
    pool.close()


class WorkerProcess:
    """One worker's pool, in a process of its own."""

    def __init__(self, directory: str, *place: int) -> None:
        self._end, there = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=work, args=(directory, place, there), daemon=True)
        self._process.start()
        there.close()

    def tell(self, *told: Any) -> None:
        """What to do next: `answer` has what came of it."""
        self._end.send(told)

    def answer(self) -> Any:
        """What the worker was asked returned, or the text of its EngineLost."""
        assert self._end.poll(ANSWER_S), "a worker hangs"
        return self._end.recv()

    def kill(self) -> None:
        """End it in the middle of what it does."""
        self._process.kill()
        self._process.join()

    def leave(self) -> None:
        """End it in order."""
        if self._process.is_alive():
            self._end.send(None)
            self._process.join(ANSWER_S)
        assert self._process.exitcode is not None
        self._end.close()


class Workers:
    """Workers of engines with as many devices each, by engine and device."""

    def __init__(self, directory: str, engines: int, devices: int, stack: ExitStack) -> None:
        self.directory, self.engines, self.devices, self._stack = directory, engines, devices, stack
        self._workers: dict[tuple[int, int], WorkerProcess] = {}
        for engine in range(engines):
            self.start(engine)

    def start(self, engine: int) -> None:
        """Start all devices of an engine, for the first time or again."""
        for device in range(self.devices):
            worker = WorkerProcess(self.directory, engine, device, self.engines, self.devices)
            self._stack.callback(worker.leave)
            self._workers[engine, device] = worker

    def of(self, *engines: int) -> list[WorkerProcess]:
        """All devices of some engines, in the order of ranks."""
        return [
            self._workers[engine, device] for device in range(self.devices) for engine in engines
        ]

    def ask(self, engines: tuple[int, ...], *told: Any) -> list[Any]:
        """What all devices of some engines answer, who are told the same at the same time."""
        for worker in self.of(*engines):
            worker.tell(*told)
        return [worker.answer() for worker in self.of(*engines)]


@contextmanager
def running(engines: int, devices: int) -> Iterator[Workers]:
    with TemporaryDirectory(dir="/dev/shm") as directory, ExitStack() as stack:
        yield Workers(directory, engines, devices, stack)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_group_is_whole_again_after_a_member_died_in_a_collective(devices: int) -> None:
    """With one file for each time that members were started; other groups go on meanwhile."""
    with running(2, devices) as workers:
        everyone, total = (0, 1), [2 ** (2 * devices) - 1] * 2 * devices
        workers.ask(everyone, "reopen", 2, (0, 0))
        workers.ask(everyone, "warm")
        for incarnation in (1, 2, 3):
            assert workers.ask(everyone, "sum", 2) == total
            for worker in workers.of(0):
                worker.tell("sum", 2)
            for worker in workers.of(1):
                worker.kill()
            told = [worker.answer() for worker in workers.of(0)]
            assert all(
                "exited or closed: engine 1 device" in text or "because of" in text for text in told
            ), told
            assert all("because of" in text for text in workers.ask((0,), "sum", 2))
            workers.ask((0,), "leave", 2)
            assert os.listdir(workers.directory) == []
            assert (
                workers.ask((0,), "sum", 2)
                == [f"all_reduce: group lane2 of ranks {list(range(2 * devices))} is not whole"]
                * devices
            )
            workers.start(1)
            workers.ask(everyone, "reopen", 2, (0, incarnation))
            of_all = f"lane2-0-0.{incarnation}"
            apart = [f"{of_all}-device{device}" for device in range(devices)]
            files = [of_all, *(apart if devices > 1 else [])]
            assert sorted(os.listdir(workers.directory)) == files
        assert workers.ask(everyone, "sum", 2) == total


def test_groups_without_the_lost_engine_go_on() -> None:
    """Four engines: those of the other pair sum as before while one of the first pair is started
    again.
    """
    with running(4, 1) as workers:
        everyone = (0, 1, 2, 3)
        for size in (2, 4):
            workers.ask(everyone, "reopen", size, (0,) * size)
        workers.ask(everyone, "warm")
        for worker in workers.of(0):
            worker.tell("sum", 4)  # it waits there, or has not come to it
            worker.kill()
        assert workers.ask((2, 3), "sum", 2) == [4 + 8] * 2
        first = workers.ask((1, 2, 3), "sum", 4)
        assert first == [15] * 3 or all("engine 0 device 0" in text for text in first)
        assert all("engine 0 device 0" in text for text in workers.ask((1, 2, 3), "sum", 4))
        workers.ask((1,), "leave", 2)
        workers.ask((1, 2, 3), "leave", 4)
        assert workers.ask((2, 3), "sum", 2) == [4 + 8] * 2
        workers.start(0)
        workers.ask((0, 1), "reopen", 2, (1, 0))
        workers.ask(everyone, "reopen", 4, (1, 0, 0, 0))
        assert sorted(os.listdir(workers.directory)) == [
            "lane2-0-1.0",
            "lane2-2-0.0",
            "lane4-0-1.0.0.0",
        ]
        assert workers.ask(everyone, "sum", 4) == [15] * 4
        assert workers.ask((0, 1), "sum", 2) == [3] * 2


def test_a_group_may_be_closed_at_any_time_and_again(tmp_path: Path) -> None:
    """Before it was opened, after it was aborted, and at the end."""
    pool = pool_of(0, 0, 2, 1, str(tmp_path))
    pool.leave(2)
    pool.reopen(2, (0, 0))
    group = pool.coordinator(2)
    (exchange,) = pool._exchanges[2]
    shm: Any = exchange.end
    shm._ranks.abort(1)
    with pytest.raises(EngineLost, match="because of engine 1 device 0"):
        group.all_reduce(torch.ones(1))
    for _ in range(2):
        pool.leave(2)
    shm.close()
    with pytest.raises(EngineLost, match=r"gather: group lane2 of ranks \[0, 1\] is not whole"):
        group.gather(torch.ones(1))
    assert not list(tmp_path.iterdir())
    pool.reopen(2, (0, 1))
    pool.close()
    pool.close()
