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
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.entry import run
from flying_lab.emulation.async_scheduling import keep_async_scheduling

FORMAT = struct.Struct("<iiiddd")
BEGUN, OVER, SCHEDULER, FORWARD = 0, 1, 2, 3
BUFFERED = 64


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
    Leader.plan_step = stamps.timed(SCHEDULER, Leader.plan_step)  # type: ignore[method-assign]
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


if __name__ == "__main__":
    run("benchmarks.group_stamps", install_ours)
