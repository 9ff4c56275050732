"""What the client asks of an engine beside requests: vLLM utilities by the names of these methods."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from flying_serving.config import MOVING
from flying_serving.engine.arbiter import LaneArbiter
from flying_serving.engine.group import Leader, Member
from flying_serving.engine.moves import Moves
from flying_serving.engine.report import Report
from flying_serving.engine.steps import StepLog
from flying_serving.engine.tracing import EngineTrace
from flying_serving.observe.metrics.engine import EngineFigures
from flying_serving.vllm_adapter.blocks import SchedulerPool


class Orders:
    """The part of an engine that answers orders. They are handled between two steps."""

    engine: int
    arbiter: LaneArbiter
    own: SchedulerPool
    members: Mapping[int, Member]
    leaders: Mapping[int, Leader]
    moves: Moves
    report: Report
    steps: StepLog
    trace: EngineTrace | None
    model_executor: Any
    _block_bytes: int
    _last_step_s: tuple[float, float]

    def flying_switch(self, group: list[int], mode: str, weave_steps: int, sent_s: float) -> dict[str, float]:
        """From now on this engine's present group is `group`.

        Args:
            group: engines, this one among them.
            mode: one of MODES (a sequential or soft switch is ordered when no request of the old layout is left).
            weave_steps: steps of the new layout for each step of an older one.
            sent_s: when the client ordered it (CLOCK_MONOTONIC).

        Returns:
            in_flight_ms: how long the step that was under way kept the order waiting.
            overhead_ms: the rest of the time since `sent_s`.
            work_ms: processor time of this call.
        """
        worked_s = time.thread_time()
        now = time.monotonic()
        if mode in MOVING and len(group) != self.arbiter.present:
            self.moves.await_word(now)
        self.arbiter.switch(len(group), hard=mode == "hard", weave_steps=weave_steps, now=now)
        if self.trace is not None:
            self.trace.ordered(group, mode, now)
        started, ended = self._last_step_s
        in_flight_s = max(0.0, ended - max(started, sent_s))
        return {
            "in_flight_ms": in_flight_s * 1e3,
            "overhead_ms": max(0.0, now - sent_s - in_flight_s) * 1e3,
            "work_ms": (time.thread_time() - worked_s) * 1e3,
        }

    def flying_report(self) -> dict[str, Any]:
        """What each lane of this engine holds and has done: requests, blocks, steps led; for `GET /flying/status`."""
        steps = {str(size): count for size, count in self.steps.counts.items()}
        return {"engine": self.engine, **self.report.status(), "steps": steps, "moves": self.moves.counts()}

    def flying_metrics(self) -> dict[str, Any]:
        """What only this engine knows of itself, for `/metrics`: an `EngineFigures`."""
        steps = {size: seconds.row for size, seconds in self.steps.durations.items()}
        report = self.report
        figures = EngineFigures(self.arbiter.hard, report.counts(), report.lent_blocks(), steps, report.prefix_cache)
        return figures.to_plain()

    def flying_check(self) -> bool:
        """Check the block bookkeeping of all lanes.

        Raises:
            IntegrityError: with both sides of the equation that does not hold.
        """
        outside: set[int] = set()
        for member in self.members.values():
            outside |= member.lent.physical()
        self.own.check(outside)
        for leader in self.leaders.values():
            leader.check()
        return True

    def flying_block_bytes(self) -> int:
        """Bytes of one KV block, all layers, on one device."""
        return self._block_bytes

    def flying_retain(self, request_ids: list[str]) -> None:
        """Requests leave this engine for another group, which may fetch their KV: see `engine/moves.py`."""
        self.moves.retain(request_ids, time.monotonic())

    def flying_moving(self, arrivals: int, tickets: int) -> None:
        """Requests are about to move: see `Moves.announce`."""
        self.moves.announce(arrivals, tickets, time.monotonic())

    def flying_move_costs(self) -> list[list[float]]:
        """What moving KV takes, as measured at start: see `KVExchange.measure`."""
        measured: list[list[float]] = self.model_executor.collective_rpc("move_costs")[0]
        return measured

    def flying_steps(self) -> list[list[float]]:
        """The steps that this engine has led since the last call: see `StepLog.take`."""
        return self.steps.take()

    def flying_calibration(self) -> list[list[float]]:
        """The steps that were measured at start, in all lanes of this engine: see `worker/calibration.py`."""
        measured: list[list[float]] = self.model_executor.collective_rpc("calibration")[0]
        return measured
