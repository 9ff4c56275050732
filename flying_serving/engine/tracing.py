"""The trace of an engine: every step that it makes, alone or as a member of a group, and every
order it takes.
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from flying_serving.engine.messages import RunStep
from flying_serving.layout.groups import aligned_group
from flying_serving.migration.messages import PullKV
from flying_serving.observe.tracing.events import (
    TracedPull,
    TracedStep,
    engine_row,
    order,
    pull,
    step,
)
from flying_serving.observe.tracing.writer import TraceWriter
from flying_serving.parallelism import Parallelism
from flying_serving.vllm_adapter.scheduler.step_contents import contents


class EngineTrace:
    """The row of one engine in the trace at `path`, which the server has begun.

    A step is a turn of its loop, and pulls are between steps, so they do not overlap.
    """

    def __init__(self, path: str, engine: int) -> None:
        self._engine = engine
        self._row = engine_row(engine, os.getppid(), os.getpid())
        self._writer = TraceWriter(path, self._row)
        self._counts: Counter[int] = Counter()
        self._received: Any = None

    def received(self, plan: Any) -> None:
        """Note that the output of a step of lane 1 has come. `plan`: its SchedulerOutput."""
        self._received = plan

    def stepped(
        self, size: int, message: RunStep | None, began_s: float, ended_s: float, waited_s: float
    ) -> None:
        """Record a turn of the loop, by CLOCK_MONOTONIC, that was a step of the lane for groups of
        `size`.

        `message`: of a group's step; None in lane 1: then it is the plan whose output has
        come in this turn, if any. `waited_s`: the time in which other members did other work.
        """
        parallelism = Parallelism.TENSOR
        if message is None:
            plan, self._received = self._received, None
        else:
            plan, parallelism = message.plan, message.parallelism
        if plan is None or not plan.total_num_scheduled_tokens:
            return
        self._counts[size] += 1
        prefill_tokens, _, context_tokens, _ = contents(plan)
        group, number = list(aligned_group(self._engine, size)), self._counts[size]
        tokens, requests = plan.total_num_scheduled_tokens, len(plan.num_scheduled_tokens)
        counts = (tokens, requests, prefill_tokens, context_tokens)
        of = TracedStep(group, number, *counts, parallelism.value)
        self._writer.add(step(self._row, of, began_s, ended_s, waited_s))

    @contextmanager
    def pulling(self, blocks_in_use: Callable[[], int], message: PullKV) -> Iterator[None]:
        """Record a pull of KV that lasts as long as the body."""
        of = TracedPull(
            list(message.source.group), message.tokens.start, len(message.tokens), blocks_in_use()
        )
        began_s = time.monotonic()
        yield
        self._writer.add(pull(self._row, of, began_s, time.monotonic()))

    def ordered(self, group: Sequence[int], mode: str, at_s: float) -> None:
        """Record an order of the layout."""
        self._writer.add(order(self._row, tuple(group), mode, at_s))

    def close(self) -> None:
        """Write the rest of the trace."""
        self._writer.close()
