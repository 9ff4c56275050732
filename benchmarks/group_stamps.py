"""Time stamps of steps and of the scheduler's work, the same in our engines and in stock vLLM's.

python -m benchmarks.group_stamps serve MODEL ... is `flying-serving` with them; stock vLLM gets
them from the plugin in `stock_stamps`. STAMPS names a folder, where each process appends to a file.

A member's step begins where vLLM's model runner is entered and is over where it has sampled. Both
systems have that runner. On emulated devices a step begins and is over when it does on the devices.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from benchmarks.entry import run
from flying_lab.emulation.async_scheduling import keep_async_scheduling

FORMAT = struct.Struct("<iiiddd")
BEGUN, OVER, SCHEDULER, FORWARD = 0, 1, 2, 3
BUFFERED = 64
NEAR = 0.05
"""Share by which a step's requests may differ: engines alone may not get as many each."""


class Stamp(NamedTuple):
    """One record of a process.

    `what`: one of the four numbers above; FORWARD is the model's own part of a step. `requests`,
    `tokens`: of the step, for BEGUN. `at_s`: CLOCK_MONOTONIC. `process_s`: processor time of the
    process so far. `thread_s`: of the thread so far; for SCHEDULER and FORWARD of this work alone.
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
        self._within: set[int] = set()

    def add(
        self,
        what: int,
        tokens: Sequence[int] = (),
        thread_s: float | None = None,
        at_s: float | None = None,
    ) -> None:
        """Keep one, and write them now and then.

        `tokens`: of each request in the step. `at_s`: now, if it is None.
        """
        spent_s = time.thread_time() if thread_s is None else thread_s
        when_s = time.monotonic() if at_s is None else at_s
        stamp = Stamp(what, len(tokens), sum(tokens), when_s, time.process_time(), spent_s)
        self._kept.append(FORMAT.pack(*stamp))
        if len(self._kept) >= BUFFERED:
            with (Path(os.environ["STAMPS"]) / str(os.getpid())).open("ab") as file:
                file.write(b"".join(self._kept))
            self._kept.clear()

    def timed(self, what: int, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same work, and keeps a record of each call that is not a
        part of another.
        """

        @wraps(work)
        def stamped(*args: Any, **options: Any) -> Any:
            self.has_scheduler |= what == SCHEDULER
            if what in self._within:
                return work(*args, **options)
            self._within.add(what)
            before_s = time.thread_time()
            try:
                return work(*args, **options)
            finally:
                self._within.remove(what)
                self.add(what, thread_s=time.thread_time() - before_s)

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

    GPUModelRunner._model_forward = stamps.timed(FORWARD, GPUModelRunner._model_forward)
    GPUModelRunner.execute_model = stamped_execute
    GPUModelRunner.sample_tokens = stamped_sample


def _install_devices(stamps: Stamps) -> None:
    from flying_lab.emulation.runner import EmulatedRunner

    execute = EmulatedRunner.execute_model

    @wraps(execute)
    def stamped(self: Any, scheduler_output: Any, *args: Any, **options: Any) -> Any:
        output = execute(self, scheduler_output, *args, **options)
        if tokens := list(scheduler_output.num_scheduled_tokens.values()):
            stamps.add(BEGUN, tokens, at_s=self.begins_s)
            stamps.add(OVER, at_s=self.ends_s)
        return output

    EmulatedRunner.execute_model = stamped  # type: ignore[method-assign]


def _install(stamps: Stamps) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    keep_async_scheduling()
    _install_model(stamps)
    _install_devices(stamps)
    Scheduler.schedule = stamps.timed(SCHEDULER, Scheduler.schedule)
    Scheduler.update_from_output = stamps.timed(SCHEDULER, Scheduler.update_from_output)


def install_ours() -> None:
    """Stamp what every engine of our server does; engines are forked from this process."""
    from flying_serving.engine.group import Leader

    stamps = Stamps()
    _install(stamps)
    Leader.order = stamps.timed(SCHEDULER, Leader.order)  # type: ignore[method-assign]
    Leader.finish = stamps.timed(SCHEDULER, Leader.finish)  # type: ignore[method-assign]


def install_stock() -> None:
    """Stamp what this process of stock vLLM does: a worker's steps or the scheduler's work."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    stamps = Stamps()
    _install(stamps)
    send = MessageQueue.enqueue
    stamped_send = stamps.timed(SCHEDULER, send)

    @wraps(send)
    def sent_by_scheduler(self: Any, *args: Any, **options: Any) -> Any:
        # a worker sends its outputs in the same way
        return (stamped_send if stamps.has_scheduler else send)(self, *args, **options)

    MessageQueue.enqueue = sent_by_scheduler


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
    update. `runner_s`: processor time for a step of a member's model runner, without the model.
    `leader_s`: processor time for a step of the process that schedules, besides the model runner.
    """

    gaps_s: list[float]
    steps_s: list[float]
    scheduler_s: float
    runner_s: float
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
    decoding = [
        row[0].requests == row[0].tokens and abs(row[0].requests - requests) <= NEAR * requests
        for row in rows
    ]
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

    def between(stamps: Sequence[Stamp]) -> list[Stamp]:
        return [stamp for stamp in stamps if first_s <= stamp.at_s <= last_s]

    member = next(one for one in within if steps_of(one))
    runner_s = _model_s(between(member)) - _sum(FORWARD, between(member))
    during = between(leader)
    spent_s = during[-1].process_s - during[0].process_s - _model_s(during)
    spent = (_sum(SCHEDULER, during), runner_s, spent_s)
    return Found(gaps_s, steps_s, *(one_s / len(gaps_s) for one_s in spent))


def find_alone(
    processes: Sequence[Sequence[Stamp]], window: tuple[float, float], requests: int
) -> Found:
    """Return what the steps of engines that serve alone took, each with so many requests."""
    began_s, ended_s = window
    makes_steps = [
        bool(steps_of([stamp for stamp in one if began_s <= stamp.at_s < ended_s]))
        for one in processes
    ]
    members = [one for one, makes in zip(processes, makes_steps, strict=True) if makes]
    # stock's scheduler may be a process of its own: any of them does for the medians
    schedulers = [
        one
        for one, makes in zip(processes, makes_steps, strict=True)
        if not makes and any(stamp.what == SCHEDULER for stamp in one)
    ]
    found = [
        find([member, *schedulers[number : number + 1]], window, requests, 1)
        for number, member in enumerate(members)
    ]
    return Found(
        [gap_s for one in found for gap_s in one.gaps_s],
        [step_s for one in found for step_s in one.steps_s],
        *(
            mean(getattr(one, name) for one in found)
            for name in ("scheduler_s", "runner_s", "leader_s")
        ),
    )


def _model_s(stamps: Sequence[Stamp]) -> float:
    return sum(step.model_s for step in steps_of(stamps))


def _sum(what: int, stamps: Sequence[Stamp]) -> float:
    return sum(stamp.thread_s for stamp in stamps if stamp.what == what)


if __name__ == "__main__":
    run("benchmarks.group_stamps", install_ours)
