"""One engine in the simulator: its work, and its choice of the next piece of it."""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from flying_lab.sim.host import HostTime
from flying_lab.sim.lanes import SimLane
from flying_lab.sim.loans import SimWeights
from flying_lab.sim.requests import SimStep
from flying_serving.scheduling.arbiter import LaneArbiter, ServeMessage, StepLane, Wait

SERVE = ServeMessage()
step_of = cache(StepLane)
"""Made once for each size: engines choose at every event."""


@dataclass
class Collective:
    """A common piece of work of the engines of a group, a step or a migration. It begins when every
    member has entered it.
    """

    begin: Callable[[], None]
    missing: int


@dataclass
class SimOrder:
    """An order to change the layout, on its way to one engine: the size of its group, and the
    receiver of the answer.
    """

    size: int
    mode: str
    weave_steps: int
    done: Callable[[float], None]


@dataclass
class SimEngine:
    """One engine: free, busy, or waiting in a collective for the other members.

    Args:
        arbiter: the production engine's.
        lanes: the lanes that it leads, by group size.
        inbox: collectives in the order in which every member enters them.
        orders: to carry out at the next step boundary.
        outstanding: sizes of the lanes whose step is planned and not over.
        awaits_announcement: requests of its old group may migrate, so it begins no step before it
            hears which.
        entered_s: when it began its step or entered its collective.
        weights: its weights, if it may lend any.
        last_size: group size of the lane that it stepped last; 0: none.
    """

    arbiter: LaneArbiter
    lanes: dict[int, SimLane] = field(default_factory=dict)
    inbox: deque[Collective] = field(default_factory=deque)
    orders: list[SimOrder] = field(default_factory=list)
    outstanding: set[int] = field(default_factory=set)
    busy: bool = False
    awaits_announcement: bool = False
    entered_s: float = 0.0
    weights: SimWeights | None = None
    wakes_at_s: float = -math.inf
    last_size: int = 0

    def turns_to(self, size: int) -> bool:
        """Note that a lane steps. Return whether the step before was of another one."""
        before, self.last_size = self.last_size, size
        return before not in (0, size)

    def active_lanes(self) -> int:
        """Return the number of lanes that it leads and that have requests."""
        return sum(lane.requests > 0 for lane in self.lanes.values())

    def choose(self, now_s: float, starved: Collection[int]) -> ServeMessage | StepLane | Wait:
        """Return the arbiter's choice, without asking it where no older lane has work; `starved`
        lanes lack blocks.
        """
        if self.awaits_announcement:
            return SERVE if self.inbox else Wait(None)
        ready = []
        for size, lane in self.lanes.items():
            if lane.requests and size not in self.outstanding and size not in starved:
                ready.append(size)
        if not self.arbiter.holds(now_s) and (not ready or ready == [self.arbiter.present]):
            if self.inbox:
                return SERVE
            if ready:
                return step_of(ready[0])
        return self.arbiter.choose(now_s, dict.fromkeys(ready, True), message=bool(self.inbox))


def weave(engines: Iterable[SimEngine], kick: Callable[[SimEngine], None]) -> None:
    """Let engines pause older lanes no longer; `kick` lets one choose its next work anew."""
    for engine in engines:
        engine.arbiter.weave()
        kick(engine)


def turn_s(engines: Sequence[SimEngine], size: int, step: SimStep, turn: HostTime) -> float:
    """Note that engines step a lane. Return how long their devices wait for the host: `turn`, if
    the step before was of another lane on any of them.
    """
    turned = [engine.turns_to(size) for engine in engines]
    return turn.seconds(step.sequences + len(step.chunks)) if any(turned) else 0.0
