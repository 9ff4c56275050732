"""Engines with real LaneArbiter in virtual time: steps take as long as they are told to, messages
travel, groups step.

Everything about models and blocks is left out; what is modelled is who may run when. The order of
messages is the one that `comm/order.py` makes: a leader's message gets its place in all inboxes at
once, and arrives a little later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flying_serving.layout.groups import Group, aligned_group
from flying_serving.scheduling.arbiter import LaneArbiter, ServeMessage, StepLane, Wait

NEVER = float("inf")
TICK_S = 1e-6


@dataclass
class GroupStep:
    """A step of a group: when it arrives at members other than its leader, and who waits in it
    since when.
    """

    group: Group
    arrives: float
    more: bool
    here_since: dict[int, float] = field(default_factory=dict)


@dataclass
class EngineState:
    """One engine: until when it is busy, what it has in its inbox, and what it has to do."""

    arbiter: LaneArbiter
    wakes: float = 0.0
    waits_since: float = 0.0
    """When it began to wait for the other members of its step."""
    inbox: list[GroupStep] = field(default_factory=list)
    at: GroupStep | None = None
    stepping: int | None = None
    ordered: set[int] = field(default_factory=set)
    ran: list[tuple[float, float, int]] = field(default_factory=list)
    """(began, ended, size) of each step."""
    waits: list[tuple[float, float | None]] = field(default_factory=list)


class VirtualNode:
    """Engines 0..n-1 whose lanes have work without end, or as `has_work` says.

    Args:
        arbiters: one for each engine.
        busy: groups that have work, single engines as groups of one.
        step_s: how long the next step of a group takes.
        order_s: how long a leader takes to plan a step, and its message to arrive.
    """

    def __init__(
        self,
        arbiters: list[LaneArbiter],
        busy: set[Group],
        step_s: Callable[[Group], float],
        order_s: Callable[[], float],
    ) -> None:
        self.engines = [EngineState(t) for t in arbiters]
        self.busy = busy
        self.step_s = step_s
        self.order_s = order_s
        self.now = 0.0

    def run_until(self, end: float) -> None:
        """Let virtual time pass."""
        while True:
            number = min(range(len(self.engines)), key=lambda e: self.engines[e].wakes)
            engine = self.engines[number]
            if engine.wakes >= end:
                return
            self.now = engine.wakes
            if engine.stepping is not None:
                self._end_step(number, engine)
            else:
                self._choose(number, engine)

    def look_again(self, number: int) -> None:
        """Let an engine that waits choose anew, as an order from the client does."""
        engine = self.engines[number]
        if engine.at is None and engine.stepping is None:
            engine.wakes = min(engine.wakes, self.now)

    def _end_step(self, number: int, engine: EngineState) -> None:
        size, engine.stepping = engine.stepping, None
        assert size is not None
        leads = number % size == 0
        more = engine.at.more if engine.at is not None else False
        began = engine.ran[-1][0]
        engine.ran[-1] = (began, self.now, size)
        if engine.at is not None and leads:
            engine.ordered.discard(size)
        engine.at = None
        waited_s = began - engine.waits_since if size > 1 else 0.0
        took_s = self.now - began
        engine.arbiter.ran(size, self.now, more=more, leads=leads, took_s=took_s, waited_s=waited_s)

    def _choose(self, number: int, engine: EngineState) -> None:
        ready = {
            size: aligned_group(number, size) in self.busy and size not in engine.ordered
            for size in (1, 2, 4)
            if size <= len(self.engines) and number % size == 0
        }
        arrived = bool(engine.inbox) and engine.inbox[0].arrives <= self.now
        action = engine.arbiter.choose(self.now, ready, message=arrived)
        if isinstance(action, ServeMessage):
            self._enter(number, engine, engine.inbox.pop(0))
        elif isinstance(action, StepLane) and action.size == 1:
            self._begin(engine, 1, self.step_s((number,)))
        elif isinstance(action, StepLane):
            self._order(number, engine, action.size)
        else:
            assert isinstance(action, Wait)
            engine.waits.append((self.now, action.timeout_s))
            arrives = engine.inbox[0].arrives if engine.inbox else NEVER
            # it may round to nothing
            timeout = NEVER if action.timeout_s is None else max(action.timeout_s, TICK_S)
            engine.wakes = min(arrives, self.now + timeout)

    def _order(self, number: int, engine: EngineState, size: int) -> None:
        engine.ordered.add(size)
        engine.wakes = self.now + self.order_s()
        group = aligned_group(number, size)
        step = GroupStep(group, engine.wakes, more=engine.arbiter.announce(size))
        for member in group:
            state = self.engines[member]
            state.inbox.append(step)
            if state.at is None and state.stepping is None and member != number:
                state.wakes = min(state.wakes, max(self.now, state.inbox[0].arrives))

    def _enter(self, number: int, engine: EngineState, step: GroupStep) -> None:
        engine.at, engine.wakes, engine.waits_since = step, NEVER, self.now
        step.here_since[number] = self.now
        if len(step.here_since) == len(step.group):
            duration = self.step_s(step.group)
            for member in step.group:
                self._begin(self.engines[member], len(step.group), duration)

    def _begin(self, engine: EngineState, size: int, duration: float) -> None:
        engine.stepping = size
        engine.wakes = self.now + duration
        engine.ran.append((self.now, NEVER, size))
