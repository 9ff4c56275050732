"""What a switch did: one record each, kept for `GET /flying/switches`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flying_serving.layout.groups import Layout


@dataclass
class Switch:
    """One change of layout.

    `cutover_ms`: from the order until the last engine works in the new layout; of that, `in_flight_ms` is the step that
    was under way there, and `overhead_ms` the rest (messages, and waiting for a processor). `work_ms`: processor time
    that the switch itself took, the client's and the busiest engine's. `drain_ms`: until the last request of the old
    layout ended. `worst_token_gap_ms`: the longest time between two tokens of any stream while the switch went on.
    """

    number: int
    old: Layout
    new: Layout
    preempt: str
    ordered_s: float
    requests_in_flight: int
    wall_time_s: float
    cutover_ms: float | None = None
    in_flight_ms: float | None = None
    overhead_ms: float | None = None
    work_ms: float = 0.0
    waited_for_idle_ms: float = 0.0
    drain_ms: float | None = None
    worst_token_gap_ms: float = 0.0
    draining: set[str] = field(default_factory=set)

    def acknowledged(self, reports: list[dict[str, float]], now_s: float) -> None:
        """All engines have answered."""
        slowest = max(reports, key=lambda report: report["in_flight_ms"] + report["overhead_ms"])
        self.in_flight_ms, self.overhead_ms = slowest["in_flight_ms"], slowest["overhead_ms"]
        self.cutover_ms = self.in_flight_ms + self.overhead_ms
        self.work_ms += max(report["work_ms"] for report in reports)
        if not self.draining:
            self._drained(now_s)

    def finished(self, request_id: str, now_s: float) -> None:
        """A request is over; the last of the old layout ends the drain."""
        if request_id in self.draining:
            self.draining.discard(request_id)
            if not self.draining and self.cutover_ms is not None:
                self._drained(now_s)

    def token_gap(self, gap_s: float) -> None:
        """A stream got a token `gap_s` after its last one."""
        self.worst_token_gap_ms = max(self.worst_token_gap_ms, gap_s * 1e3)

    @property
    def open(self) -> bool:
        """Whether requests of the old layout still run, or engines have not answered."""
        return self.drain_ms is None

    def _drained(self, now_s: float) -> None:
        self.drain_ms = (now_s - self.ordered_s) * 1e3

    def to_json(self) -> dict[str, Any]:
        """What `GET /flying/switches` shows."""
        return {
            "number": self.number,
            "time": self.wall_time_s,
            "from": self.old.to_lists(),
            "to": self.new.to_lists(),
            "preempt": self.preempt,
            "requests_in_flight": self.requests_in_flight,
            "waited_for_idle_ms": self.waited_for_idle_ms,
            "cutover_ms": self.cutover_ms,
            "in_flight_step_ms": self.in_flight_ms,
            "overhead_ms": self.overhead_ms,
            "work_ms": self.work_ms,
            "drain_ms": self.drain_ms,
            "worst_token_gap_ms": self.worst_token_gap_ms,
        }
