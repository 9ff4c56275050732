"""Changes of layout: the open ones, and the record of each, kept for `GET /flying/switches`."""

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flying_serving.config import MIGRATING_MODES
from flying_serving.controller.gaps import TokenGaps
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.snapshot import Decision, Need
from flying_serving.wire import SwitchAnswer

KEPT = 1000
RECENT_S = 60.0
"""Seconds in which each switch for load makes the next one less likely."""
SETTLE_S = 2.0
"""Seconds from a switch for load to the next one at least.

The rate of a burst that has just begun is uncertain, and so is which layout suits it.
"""
PREDICTIONS = (
    "predicted_request_s",
    "predicted_stay_request_s",
    "predicted_gain_request_s",
    "predicted_cost_request_s",
    "promised_request_s",
    "least_gain_request_s",
    "unsure_at_requests_per_s",
    "considered_request_s",
)
"""Keys of the figures that `predictions` gives for a decision, besides its reason."""
MOST_OPEN = 64
"""Most switches that are open. Beyond, the end of the oldest is not waited for."""
WAITING_MODES = ("sequential", "soft")
"""Modes of switches that wait until old requests have ended."""


@dataclass
class Switch:
    """The record of a change of layout. No request is in it: `OpenSwitch` has those.

    Args:
        old: the layout before.
        new: the layout after it.
        mode: of the switch; it may change while the switch waits.
        decided_s: time of the decision, by the controller's clock.
        requests_in_flight: number of requests that had a group at the decision.
        decision: of the policy; None if an operator ordered the switch.
        number: given by `Switches.begin`.
        ordered_s: time of the order to the engines, by the controller's clock.
        wall_time_s: the same, as `time.time`.
        slowest: the answer of the last engine that worked in the new layout.
        work_ms: processor time that the switch itself took, the API server's and the busiest
            engine's.
        drain_ms: from the order until the last old request ended or migrated. None as well if too
            many later switches began before that.
        problem: why it has failed or was dropped.
        was_dropped: whether it was not made.
        predicted_share: of a switch for load, the share of what staying costs that it was predicted
            to gain over the horizon, less its cost. None until it was looked back on (`Hindsight`).
        seen_share: the share that it gained, with the arrivals that came.
        promises_from_s: time from which on its promise gets less (`Switches.promised`).
        gaps: times between tokens, as long as the switch is open.
    """

    old: Layout
    new: Layout
    mode: str
    decided_s: float
    requests_in_flight: int
    decision: Decision | None = None
    number: int = 0
    ordered_s: float = 0.0
    wall_time_s: float = 0.0
    slowest: SwitchAnswer | None = None
    work_ms: float = 0.0
    drain_ms: float | None = None
    problem: str | None = None
    was_dropped: bool = False
    predicted_share: float | None = None
    seen_share: float | None = None
    promises_from_s: float = 0.0
    gaps: TokenGaps | None = None
    _worst_token_gap_ms: float = 0.0

    @property
    def changed_engines(self) -> list[int]:
        """Engines whose groups change in the switch."""
        return [
            engine for group in self.new.groups if group not in self.old.groups for engine in group
        ]

    @property
    def paused_engines(self) -> list[int]:
        """Engines that pause older lanes after their answers, until they hear which requests
        migrate.
        """
        return self.changed_engines if self.mode in MIGRATING_MODES else []

    @property
    def is_for_load(self) -> bool:
        """True if the policy made the switch for the present load."""
        return self.decision is not None and self.decision.stay is not None and not self.was_dropped

    @property
    def waited_for_idle_ms(self) -> float:
        """The time from the decision to the order."""
        return (self.ordered_s - self.decided_s) * 1e3

    @property
    def cutover_ms(self) -> float | None:
        """The time from the order until the last engine works in the new layout."""
        return None if self.slowest is None else self.slowest.cutover_ms

    @property
    def is_answered(self) -> bool:
        """True if all engines have answered, or none will be waited for."""
        return self.slowest is not None or self.problem is not None

    @property
    def open(self) -> bool:
        """True if old requests run or migrate, or engines have not answered."""
        return self.gaps is not None

    @property
    def worst_token_gap_ms(self) -> float:
        """The longest time so far between two tokens of any stream, in ms.

        It counts from the order to the end of the drain, and to the next token of each stream that
        migrated.
        """
        return (
            self._worst_token_gap_ms
            if self.gaps is None
            else self.gaps.worst_since(self.ordered_s) * 1e3
        )

    def close(self) -> None:
        """Close the switch: it is over, or its end is not waited for any longer. No later gap
        counts.
        """
        self._worst_token_gap_ms, self.gaps = self.worst_token_gap_ms, None

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the switch in `GET /flying/switches`."""
        return {
            "number": self.number,
            "time": self.wall_time_s,
            "from": self.old.to_lists(),
            "to": self.new.to_lists(),
            "mode": self.mode,
            **predictions(self.decision),
            "requests_in_flight": self.requests_in_flight,
            "waited_for_idle_ms": self.waited_for_idle_ms,
            "cutover_ms": self.cutover_ms,
            "in_flight_step_ms": self.slowest and self.slowest.in_flight_ms,
            "overhead_ms": self.slowest and self.slowest.overhead_ms,
            "work_ms": self.work_ms,
            "drain_ms": self.drain_ms,
            "worst_token_gap_ms": self.worst_token_gap_ms,
            "predicted_gain_share": self.predicted_share,
            "seen_gain_share": self.seen_share,
            "problem": self.problem,
        }


def predictions(decision: Decision | None) -> dict[str, Any]:
    """Return why the layout changes or stays, in request-seconds.

    Null: an operator ordered it, or the gain has no limit.
    """
    if decision is None:
        return {"reason": "ordered by an operator"} | dict.fromkeys(PREDICTIONS)
    return {
        "reason": decision.reason,
        "predicted_request_s": {str(layout): cost for layout, cost in decision.predicted.items()},
        "predicted_stay_request_s": decision.stay,
        "predicted_gain_request_s": decision.gain if decision.gain < math.inf else None,
        "predicted_cost_request_s": decision.cost,
        "promised_request_s": decision.promised,
        "least_gain_request_s": decision.least_gain,
        "unsure_at_requests_per_s": decision.unsure_at,
        "considered_request_s": dict(decision.considered),
    }


@dataclass
class OpenSwitch:
    """A switch that is under way, or whose old requests run or migrate.

    Args:
        switch: its record.
        draining: requests in groups which the new layout lacks.
        weave_steps: steps of the new layout for each step of an older one.
        begun_mode: its mode at its decision; it may have another one now.
        migrating: requests that have tokens, migrate, and have not got the next token.
    """

    switch: Switch
    draining: set[str]
    weave_steps: int
    begun_mode: str
    migrating: set[str] = field(default_factory=set)

    @property
    def waits_for_requests(self) -> bool:
        """True if old requests must end before engines are told."""
        return self.switch.mode in WAITING_MODES and bool(self.draining)

    @property
    def is_over(self) -> bool:
        """True if it waits for no request and no engine."""
        return self.switch.drain_ms is not None and not self.migrating

    def acknowledged(self, answers: list[SwitchAnswer], now_s: float) -> None:
        """Note that all engines have answered."""
        self.switch.slowest = max(answers, key=lambda answer: answer.cutover_ms)
        self.switch.work_ms += max(answer.work_ms for answer in answers)
        if not self.draining:
            self._drained(now_s)

    def failed(self, problem: str, now_s: float) -> None:
        """Note that some engine did not answer, or that the switch is not made."""
        self.switch.problem = problem
        self.migrating.clear()
        self._drained(now_s)

    def left(self, request_id: str, now_s: float) -> None:
        """Note that a request is over, or goes on elsewhere; the last of the old layout ends the
        drain.
        """
        if request_id in self.draining:
            self.draining.discard(request_id)
            if not self.draining and self.switch.slowest is not None:
                self._drained(now_s)

    def _drained(self, now_s: float) -> None:
        self.switch.drain_ms = (now_s - self.switch.ordered_s) * 1e3


class Switches:
    """The last switches, and token gaps that were noted while any of them was open."""

    def __init__(self) -> None:
        self.kept: deque[Switch] = deque(maxlen=KEPT)
        self.count = 0
        self._open: deque[OpenSwitch] = deque()
        self._migrating: set[str] = set()
        self._gaps = TokenGaps()
        self._void = 0  # number of the last switch that promises nothing any more

    def begin(self, opened: OpenSwitch) -> None:
        """Keep a new switch, decided now."""
        switch = opened.switch
        self.count += 1
        switch.number, switch.ordered_s, switch.gaps = self.count, switch.decided_s, self._gaps
        switch.promises_from_s = switch.decided_s
        self._open.append(opened)
        if len(self._open) > MOST_OPEN:
            self._open.popleft().switch.close()
        self.kept.append(switch)

    @property
    def joining(self) -> list[Group]:
        """The groups that the last switch makes, as long as its engines have not answered."""
        last = self.kept[-1] if self.kept else None
        if last is None or last.is_answered:
            return []
        return [group for group in last.new.groups if group not in last.old.groups]

    def got_token(self, request_id: str, now_s: float) -> None:
        """Note that a stream got a token."""
        self._gaps.got_token(request_id, now_s, watched=bool(self._open))
        if request_id in self._migrating:
            self._arrived(request_id)
            self.prune()

    def ended(self, request_id: str, now_s: float) -> None:
        """Note that a request is over."""
        self._gaps.ended(request_id)
        self._arrived(request_id)
        self._left(request_id, now_s)

    def migrated(self, request_id: str, now_s: float) -> None:
        """Note that a request has left its group and goes on in another.

        If it has tokens, its next one belongs to the switches whose old layout it leaves.
        """
        for opened in self._open:
            if request_id in self._gaps and request_id in opened.draining:
                opened.migrating.add(request_id)
                self._migrating.add(request_id)
        self._left(request_id, now_s)

    def _arrived(self, request_id: str) -> None:
        """Wait no longer for the next token of a request that may migrate."""
        self._migrating.discard(request_id)
        for opened in self._open:
            opened.migrating.discard(request_id)

    def _left(self, request_id: str, now_s: float) -> None:
        for opened in self._open:
            opened.left(request_id, now_s)
        self.prune()

    def prune(self) -> None:
        """Close the switches that are over."""
        if not self._open:
            return
        for opened in self._open:
            if opened.is_over:
                opened.switch.close()
        self._open = deque(opened for opened in self._open if not opened.is_over)

    def promised(self, horizon_s: float, now_s: float) -> float:
        """Return what recent switches promised (`Decision.promise`), less as the horizon passes.

        A switch that was dropped or has failed promises nothing.
        """
        total = 0.0
        for switch in reversed(self.kept):
            left = 1.0 - (now_s - switch.promises_from_s) / horizon_s
            if left <= 0.0 or switch.number <= self._void:
                break
            if switch.decision is not None and switch.problem is None:
                total += left * switch.decision.promise
        return total

    def recent(self, now_s: float) -> int:
        """Return the number of switches for load in the last RECENT_S."""
        recent = itertools.takewhile(
            lambda switch: now_s - switch.decided_s < RECENT_S, reversed(self.kept)
        )
        return sum(switch.is_for_load for switch in recent)

    def are_settled(self, now_s: float) -> bool:
        """Return whether a switch for load may follow the last one."""
        last_s = next(
            (switch.decided_s for switch in reversed(self.kept) if switch.is_for_load), -math.inf
        )
        return now_s - last_s >= SETTLE_S

    def note_needs(self, needs: Sequence[Need], now_s: float) -> None:
        """Note the groups that requests which wait or begin need now."""
        if not all(need.urgent for need in needs):
            self.needed_again(now_s)

    def needed_again(self, now_s: float) -> None:
        """Note that a long request needs a group.

        If the last switch was made for one, its promise counts from now on.
        """
        last = self.kept[-1].decision if self.kept else None
        if last is not None and last.stay is None:
            self.kept[-1].promises_from_s = now_s

    def void_promises(self) -> None:
        """Void the promises of past switches: their layout is no more, and none of them gains
        anything from now on.
        """
        self._void = self.count
