"""One engine in the simulator, and what it is told to do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from flying_serving.engine.arbiter import LaneArbiter
from flying_serving.sim.lanes import SimLane


@dataclass
class Ticket:
    """What engines do together, in order, a step or an exchange of KV: `begin` when every one has come to it."""

    begin: Callable[[], None]
    missing: int


@dataclass
class SimOrder:
    """An order to change the layout, on its way to one engine."""

    size: int
    mode: str
    weave_steps: int
    done: Callable[[float], None]


@dataclass
class SimEngine:
    """One engine: free, busy, or waiting in a ticket for the other members.

    `led`: lanes by group size. `held`: requests are about to move, so it only serves tickets.
    """

    engine: int
    arbiter: LaneArbiter
    inbox: deque[Ticket] = field(default_factory=deque)
    led: dict[int, SimLane] = field(default_factory=dict)
    outstanding: set[int] = field(default_factory=set)
    orders: list[SimOrder] = field(default_factory=list)
    busy: bool = False
    held: bool = False
    came_s: float = 0.0
    wakes_at_s: float = -1.0
