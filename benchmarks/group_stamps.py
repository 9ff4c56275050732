"""Time stamps of steps and of the scheduler's work, the same in our engines and in stock vLLM's.

python -m benchmarks.group_stamps serve MODEL ... is `flying-serving` with them; stock vLLM gets
them from the plugin in `stock_stamps`. STAMPS names a folder, where each process appends to a file.

A member's step begins where vLLM's model runner is entered and is over where it has sampled. Both
systems have that runner.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.entry import run

FORMAT = struct.Struct("<iiiddd")
BEGUN, OVER, SCHEDULER = 0, 1, 2
BUFFERED = 64


class Stamp(NamedTuple):
    """One record of a process.

    `what`: BEGUN, OVER or SCHEDULER. `requests`, `tokens`: of the step, for BEGUN. `at_s`:
    CLOCK_MONOTONIC. `process_s`: processor time of the process so far. `thread_s`: of the thread so
    far; for SCHEDULER of this work alone.
    """

    what: int
    requests: int
    tokens: int
    at_s: float
    process_s: float
    thread_s: float


class Stamps:
    """Writes the records of this process."""

    def __init__(self) -> None:
        self.has_scheduler = False
        self._kept: list[bytes] = []

    def add(self, what: int, tokens: Sequence[int] = (), thread_s: float | None = None) -> None:
        """Keep one, and write them now and then. `tokens`: of each request in the step."""
        spent_s = time.thread_time() if thread_s is None else thread_s
        stamp = Stamp(
            what, len(tokens), sum(tokens), time.monotonic(), time.process_time(), spent_s
        )
        self._kept.append(FORMAT.pack(*stamp))
        if len(self._kept) >= BUFFERED:
            with (Path(os.environ["STAMPS"]) / str(os.getpid())).open("ab") as file:
                file.write(b"".join(self._kept))
            self._kept.clear()

    def scheduling(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is part of the scheduler's work, with a record of each call."""

        @wraps(work)
        def stamped(*args: Any, **options: Any) -> Any:
            self.has_scheduler = True
            before_s = time.thread_time()
            try:
                return work(*args, **options)
            finally:
                self.add(SCHEDULER, thread_s=time.thread_time() - before_s)

        return stamped


def _install_model(stamps: Stamps) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    execute, sample = GPUModelRunner.execute_model, GPUModelRunner.sample_tokens

    @wraps(execute)
    def stamped_execute(self: Any, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        stamps.add(BEGUN, list(scheduler_output.num_scheduled_tokens.values()))
        return execute(self, scheduler_output, *args, **options)

    @wraps(sample)
    def stamped_sample(self: Any, *args: Any, **options: Any) -> Any:
        output = sample(self, *args, **options)
        stamps.add(OVER)
        return output

    GPUModelRunner.execute_model = stamped_execute
    GPUModelRunner.sample_tokens = stamped_sample


def install_ours() -> None:
    """Stamp what every engine of our server does; engines are forked from this process."""
    from flying_serving.engine.group import Leader

    stamps = Stamps()
    _install_model(stamps)
    Leader.order = stamps.scheduling(Leader.order)  # type: ignore[method-assign]
    Leader.finish = stamps.scheduling(Leader.finish)  # type: ignore[method-assign]


def install_stock() -> None:
    """Stamp what this process of stock vLLM does: a worker's steps or the scheduler's work."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.v1.core.sched.scheduler import Scheduler

    stamps = Stamps()
    _install_model(stamps)
    send = MessageQueue.enqueue
    stamped_send = stamps.scheduling(send)

    @wraps(send)
    def sent_by_scheduler(self: Any, *args: Any, **options: Any) -> Any:
        # a worker sends its outputs in the same way
        return (stamped_send if stamps.has_scheduler else send)(self, *args, **options)

    MessageQueue.enqueue = sent_by_scheduler
    Scheduler.schedule = stamps.scheduling(Scheduler.schedule)
    Scheduler.update_from_output = stamps.scheduling(Scheduler.update_from_output)


# ---- what the records say


@dataclass(frozen=True)
class Step:
    """A step on one member."""

    requests: int
    tokens: int
    begun_s: float
    over_s: float
    model_s: float
    """Processor time of the thread that runs the model."""


@dataclass(frozen=True)
class Found:
    """What a group's steps of one window took, those that decode one token of each request.

    `gaps_s`: from the end of a step on the last member to the begin of the next one on the last
    member. `scheduler_s`: processor time for a step of the scheduler's work: schedule, send,
    update. `leader_s`: processor time for a step of the process that schedules, besides the model.
    """

    gaps_s: list[float]
    steps_s: list[float]
    scheduler_s: float
    leader_s: float


def read(folder: Path) -> list[list[Stamp]]:
    """Return the records of each process."""
    return [
        [Stamp(*fields) for fields in FORMAT.iter_unpack(path.read_bytes())]
        for path in sorted(folder.iterdir())
    ]


def steps_of(stamps: Sequence[Stamp]) -> list[Step]:
    """Return the steps of a process. One without tokens samples nothing, and is none."""
    steps, begun = list[Step](), None
    for stamp in stamps:
        if stamp.what == BEGUN:
            begun = stamp
        elif stamp.what == OVER and begun is not None:
            model_s = stamp.thread_s - begun.thread_s
            steps.append(Step(begun.requests, begun.tokens, begun.at_s, stamp.at_s, model_s))
            begun = None
    return steps


def find(
    processes: Sequence[Sequence[Stamp]], window: tuple[float, float], requests: int, members: int
) -> Found:
    """Return what the steps with so many requests took in a window.

    Raises ValueError if the members of the group did not make the same steps, or no two in a row.
    """
    began_s, ended_s = window
    within = [[stamp for stamp in one if began_s <= stamp.at_s < ended_s] for one in processes]
    made = [steps for one in within if (steps := steps_of(one))]
    if len(made) != members:
        raise ValueError(f"{len(made)} processes made steps, not {members}")
    gaps_s, steps_s = [], []
    rows = list(zip(*made, strict=False))  # the last records of a server are not written
    if any(len({(step.requests, step.tokens) for step in row}) > 1 for row in rows):
        raise ValueError("the members did not make the same steps")
    decoding = [row[0].requests == row[0].tokens == requests for row in rows]
    for number in range(1, len(rows)):
        if decoding[number - 1] and decoding[number]:
            begun_s = max(step.begun_s for step in rows[number])
            gaps_s.append(begun_s - max(step.over_s for step in rows[number - 1]))
            steps_s.append(begun_s - max(step.begun_s for step in rows[number - 1]))
    if not gaps_s:
        raise ValueError(f"no two steps of {requests} requests in a row")
    counted = [row for row, counts in zip(rows, decoding, strict=True) if counts]
    first_s, last_s = counted[0][0].begun_s, counted[-1][0].begun_s
    leader = next(one for one in within if any(stamp.what == SCHEDULER for stamp in one))
    during = [stamp for stamp in leader if first_s <= stamp.at_s <= last_s]
    scheduler_s = sum(stamp.thread_s for stamp in during if stamp.what == SCHEDULER)
    model_s = sum(step.model_s for step in steps_of(during))
    spent_s = during[-1].process_s - during[0].process_s - model_s
    return Found(gaps_s, steps_s, scheduler_s / len(gaps_s), spent_s / len(gaps_s))


if __name__ == "__main__":
    run("benchmarks.group_stamps", install_ours)
