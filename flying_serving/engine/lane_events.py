"""The engine's actions at each event of a lane's scheduler: see `vllm_adapter/scheduler/`."""

from collections.abc import Callable, Sequence
from typing import Any

from flying_serving.engine.loop import Instruments
from flying_serving.layout.groups import Group
from flying_serving.migration.source import Source
from flying_serving.vllm_adapter.scheduler.beginnings import beginnings_in
from flying_serving.vllm_adapter.scheduler.failures import failures
from flying_serving.vllm_adapter.scheduler.scheduler import LaneHooks


class LaneEvents(LaneHooks):
    """The hooks of the scheduler of one lane.

    Args:
        group: the group of the lane, which this engine leads.
        instruments: they observe the steps and complete the statistics.
        source: it offers the KV of requests that leave.
        emit: sends outputs to clients, as `Host.emit`.
    """

    def __init__(
        self,
        group: Group,
        instruments: Instruments,
        source: Source,
        emit: Callable[[dict[int, Any] | None], None],
    ) -> None:
        self._group = group
        self._steps = instruments.steps
        self._report = instruments.report
        # steps of wider groups are traced by all members: see EngineTrace.stepped
        self._trace = instruments.trace if len(group) == 1 else None
        self._source = source
        self._emit = emit

    def step_planned(self, plan: Any) -> None:
        """Time the step, and tell the API server of requests that begin in it."""
        self._steps.planned(self._group, plan)
        beginnings = beginnings_in(plan)
        if beginnings is not None:
            self._emit(beginnings)

    def output_received(self, plan: Any) -> None:
        """Log the step, and note its plan for the trace."""
        if self._trace is not None:
            self._trace.received(plan)
        self._steps.received(self._group, plan)

    def blocks_freed(self, request: Any) -> None:
        """Offer the KV of a request that goes on elsewhere, or revoke its offer."""
        self._source.blocks_freed(len(self._group), request)

    def stats_made(self, stats: Any) -> None:
        """Give the statistics of the lane the counts of the engine."""
        self._report.complete(len(self._group), stats)

    def requests_failed(self, requests: Sequence[Any], why: str) -> None:
        """Tell the API server that the requests have ended with an error."""
        self._emit(failures(requests, why))
