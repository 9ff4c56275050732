"""Engines with real LaneArbiter in virtual time: steps take as long as they are told to, tickets travel, groups meet.

Everything about models and blocks is left out; what is modelled is who may run when. The order of tickets is the one
that `comm/order.py` makes: a leader's ticket gets its place in all inboxes at once, and arrives a little later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flying_serving.engine.arbiter import LaneArbiter, Serve, StepTurn, Wait
from flying_serving.layout.groups import Group, aligned_group

NEVER = float("inf")
TICK_S = 1e-6


@dataclass
class Ticket:
    """A step of a group: when it arrives at members other than its leader, and who has come to it since when."""

    group: Group
    arrives: float
    more: bool
    came: dict[int, float] = field(default_factory=dict)


@dataclass
class EngineState:
    """One engine: until when it is busy, what it has in its inbox, and what it has to do."""

    arbiter: LaneArbiter
    wakes: float = 0.0
    came: float = 0.0
    """When it began to wait for the other members of its step."""
    inbox: list[Ticket] = field(default_factory=list)
    at: Ticket | None = None
    stepping: int | None = None
    ordered: set[int] = field(default_factory=set)
    ran: list[tuple[float, float, int]] = field(default_factory=list)
    """(began, ended, size) of each step."""
    waits: list[tuple[float, float | None]] = field(default_factory=list)


class Node:
    """Engines 0..n-1 whose lanes have work without end, or as `has_work` says.

    Args:
        turns: one for each engine.
        busy: groups that have work, single engines as groups of one.
        step_s: how long the next step of a group takes.
        order_s: how long a leader takes to order a step, and its ticket to arrive.
    """

    def __init__(
        self, turns: list[LaneArbiter], busy: set[Group], step_s: Callable[[Group], float], order_s: Callable[[], float]
    ) -> None:
        self.engines = [EngineState(t) for t in turns]
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
        led_here = number % size == 0
        more = engine.at.more if engine.at is not None else False
        began = engine.ran[-1][0]
        engine.ran[-1] = (began, self.now, size)
        if engine.at is not None and led_here:
            engine.ordered.discard(size)
        engine.at = None
        waited_s = began - engine.came if size > 1 else 0.0
        took_s = self.now - began
        engine.arbiter.ran(size, self.now, more=more, led_here=led_here, took_s=took_s, waited_s=waited_s)

    def _choose(self, number: int, engine: EngineState) -> None:
        ready = {
            size: aligned_group(number, size) in self.busy and size not in engine.ordered
            for size in (1, 2, 4)
            if size <= len(self.engines) and number % size == 0
        }
        arrived = bool(engine.inbox) and engine.inbox[0].arrives <= self.now
        turn = engine.arbiter.choose(self.now, ready, ticket=arrived)
        if isinstance(turn, Serve):
            self._come(number, engine, engine.inbox.pop(0))
        elif isinstance(turn, StepTurn) and turn.size == 1:
            self._begin(engine, 1, self.step_s((number,)))
        elif isinstance(turn, StepTurn):
            self._order(number, engine, turn.size)
        else:
            assert isinstance(turn, Wait)
            engine.waits.append((self.now, turn.timeout_s))
            arrives = engine.inbox[0].arrives if engine.inbox else NEVER
            timeout = NEVER if turn.timeout_s is None else max(turn.timeout_s, TICK_S)  # it may round to nothing
            engine.wakes = min(arrives, self.now + timeout)

    def _order(self, number: int, engine: EngineState, size: int) -> None:
        engine.ordered.add(size)
        engine.wakes = self.now + self.order_s()
        group = aligned_group(number, size)
        ticket = Ticket(group, engine.wakes, more=engine.arbiter.announce(size))
        for member in group:
            state = self.engines[member]
            state.inbox.append(ticket)
            if state.at is None and state.stepping is None and member != number:
                state.wakes = min(state.wakes, max(self.now, state.inbox[0].arrives))

    def _come(self, number: int, engine: EngineState, ticket: Ticket) -> None:
        engine.at, engine.wakes, engine.came = ticket, NEVER, self.now
        ticket.came[number] = self.now
        if len(ticket.came) == len(ticket.group):
            duration = self.step_s(ticket.group)
            for member in ticket.group:
                self._begin(self.engines[member], len(ticket.group), duration)

    def _begin(self, engine: EngineState, size: int, duration: float) -> None:
        engine.stepping = size
        engine.wakes = self.now + duration
        engine.ran.append((self.now, NEVER, size))
