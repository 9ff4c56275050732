"""Engines in the simulator: production `LaneArbiter`s choose the next step, tickets put group steps into one order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flying_serving.config import MIGRATING_MODES
from flying_serving.engine.arbiter import LaneArbiter, ServeMessage, StepLane, Wait
from flying_serving.errors import ConfigError
from flying_serving.layout.groups import Group, Layout
from flying_serving.predict.moves import MoveCost
from flying_serving.sim.engines import SimEngine, SimOrder, Ticket
from flying_serving.sim.lanes import SimLane
from flying_serving.sim.requests import BlockPool, SimRequest, SimStep

SHORTEST_S = 1e-6
"""Shortest wait: a shorter one may be lost in rounding, and time would stand still."""

StepTime = Callable[[int, SimStep], float]
"""(group size, what is in the step) -> seconds."""


@dataclass(frozen=True)
class ClusterShape:
    """What the simulated node is.

    Args:
        engines: how many.
        sizes: group sizes.
        blocks: KV blocks per engine, vLLM's null block among them.
        block_tokens: by group size, tokens in one block.
        slots: requests per group at a time.
        budget_tokens: tokens in a step at most.
        message_s: between the API server and an engine, one way.
        frontend_s: what a server adds to a request's first token outside of steps, messages included.
        max_pause_s, weave_steps: as in the server's settings.
        keep_times: whether the time of each token is kept.
        recomputes: a hard switch throws KV away, so that paused requests are computed again.
        switch_s: an engine that changes its group does nothing else for so long.
        moves: what it takes to move KV between groups, by the engines that have to meet; without, it stays.
    """

    engines: int
    sizes: tuple[int, ...]
    blocks: int
    block_tokens: dict[int, int]
    slots: int
    budget_tokens: int
    message_s: float = 0.0005
    frontend_s: float = 0.0
    max_pause_s: float = 1.0
    weave_steps: int = 1
    keep_times: bool = False
    recomputes: bool = False
    switch_s: float = 0.0
    moves: Mapping[int, MoveCost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """As in vLLM, every running request gets a token from each step."""
        if self.budget_tokens < self.slots:
            raise ConfigError(
                f"max_num_batched_tokens={self.budget_tokens}: must be at least max_num_seqs={self.slots}"
            )


class Clock:
    """Virtual time: what is to happen, in order."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[..., None], *args: Any) -> None:
        """Let something happen at a time."""
        self._count += 1
        heapq.heappush(self._events, (max(time_s, self.now_s), self._count, action, args))

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Let something happen after a while."""
        self.at(self.now_s + delay_s, action, *args)

    def step(self) -> bool:
        """Do the next thing; False if there is none."""
        if not self._events:
            return False
        self.now_s, _, action, args = heapq.heappop(self._events)
        action(*args)
        return True


class Cluster:
    """The engines of one node on a virtual clock.

    Args:
        shape: what they are.
        step_time: how long steps take.
        clock: shared with other nodes.
        on_tokens: called with the requests that got their first token of a lane and those that have ended.
        on_step: called with a lane, the seconds of the step that it begins, and what is in it.
    """

    def __init__(
        self,
        shape: ClusterShape,
        step_time: StepTime,
        clock: Clock,
        on_tokens: Callable[[list[SimRequest], list[SimRequest]], None],
        on_step: Callable[[SimLane, float, SimStep], None],
    ) -> None:
        self.shape = shape
        self.clock = clock
        self._step_time = step_time
        self._on_tokens = on_tokens
        self._on_step = on_step
        self.engines = [SimEngine(e, LaneArbiter(shape.weave_steps, shape.max_pause_s)) for e in range(shape.engines)]
        self.pools = [BlockPool(shape.blocks - 1) for _ in range(shape.engines)]
        self.lanes: dict[Group, SimLane] = {}
        for size in shape.sizes:
            for group in Layout.uniform(shape.engines, size).groups:
                members = [self.pools[engine] for engine in group]
                lane = SimLane(
                    group, members, shape.block_tokens[size], shape.slots, shape.budget_tokens, shape.keep_times
                )
                self.lanes[group] = self.engines[group[0]].led[size] = lane
        self._starved: dict[Group, SimLane] = {}

    def add(self, group: Group, request: SimRequest) -> None:
        """A request reaches the leader of a group, with the KV of its `computed_tokens`."""
        self.lanes[group].add(request)
        self._kick(self.engines[group[0]])

    def remove(self, request: SimRequest) -> None:
        """A request is taken from its group."""
        if request.lane is not None:
            request.lane.remove(request)
            request.left_s = self.clock.now_s
            self._feed()

    def meet(self, group: Group, duration_s: float, done: Callable[..., None], *args: Any) -> None:
        """All engines of a group come together at their next step boundaries, and do nothing else for so long."""
        members = [self.engines[engine] for engine in group]
        self._call(members, partial(self.clock.after, duration_s, self._met, members, done, args))

    def _met(self, engines: Sequence[SimEngine], done: Callable[..., None], args: tuple[Any, ...]) -> None:
        done(*args)
        for engine in engines:
            engine.busy = False
        for engine in engines:
            self._kick(engine)

    def order(self, engine: int, order: SimOrder) -> None:
        """An order reaches an engine; it takes effect at its next step boundary."""
        self.engines[engine].orders.append(order)
        self._kick(self.engines[engine])

    def _changed(self, engine: SimEngine) -> None:
        engine.busy = False
        self._kick(engine)

    def _take(self, engine: SimEngine, order: SimOrder) -> bool:
        """Carry out an order; whether this engine's group changes."""
        now, before = self.clock.now_s, engine.arbiter.present
        hard = order.mode == "hard"
        if hard and self.shape.recomputes:
            for size, lane in engine.led.items():
                if size != order.size:
                    lane.preempt_all()
        engine.arbiter.switch(order.size, hard=hard, weave_steps=order.weave_steps, now=now)
        engine.held = order.mode in MIGRATING_MODES and order.size != before
        order.done(now)
        return order.size != before

    def moved(self) -> None:
        """Engines know which requests move: whatever else there is may go on."""
        for engine in self.engines:
            if engine.held:
                engine.held = False
                self._kick(engine)

    def _kick(self, engine: SimEngine) -> None:
        """Let an engine that is free choose what to do."""
        if engine.busy:
            return
        if engine.orders:
            orders, engine.orders = engine.orders, []
            changes = [self._take(engine, order) for order in orders]
            if self.shape.switch_s and any(changes):
                engine.busy = True
                self.clock.after(self.shape.switch_s, self._changed, engine)
                return
        if engine.held and not engine.inbox:
            return
        size = 0 if engine.held else self._obvious(engine)
        if size is not None:
            if size == 0:
                self._join(engine, engine.inbox.popleft())
            else:
                self._begin(engine, size)
            return
        now = self.clock.now_s
        ready = {size: size not in engine.outstanding and lane.requests > 0 for size, lane in engine.led.items()}
        while True:
            turn = engine.arbiter.choose(now, ready, message=bool(engine.inbox))
            if isinstance(turn, ServeMessage):
                self._join(engine, engine.inbox.popleft())
                return
            if isinstance(turn, Wait):
                if turn.timeout_s is not None and any(ready.values()):
                    self._wake(engine, now + max(turn.timeout_s, SHORTEST_S))
                return
            assert isinstance(turn, StepLane)
            if self._begin(engine, turn.size):
                return
            ready[turn.size] = False

    def _obvious(self, engine: SimEngine) -> int | None:
        """0: the oldest ticket; a size: a step of the present lane; None: ask `LaneArbiter.choose` (slow)."""
        if engine.arbiter.holds(self.clock.now_s):
            return None
        present, ready = engine.arbiter.present, 0
        for size, lane in engine.led.items():
            if lane.requests and size not in engine.outstanding:
                if size != present:
                    return None
                ready = size
        return 0 if engine.inbox else ready or None

    def _wake(self, engine: SimEngine, time_s: float) -> None:
        if not self.clock.now_s < engine.wakes_at_s <= time_s:
            engine.wakes_at_s = time_s
            self.clock.at(time_s, self._kick, engine)

    def _feed(self) -> None:
        """Blocks are free: lanes that lacked some, perhaps on engines that do not lead them, may go on."""
        starved, self._starved = self._starved, {}
        for group in starved:
            self._kick(self.engines[group[0]])

    def _begin(self, engine: SimEngine, size: int) -> bool:
        lane = engine.led[size]
        if lane.begin() is None:
            self._starved[lane.group] = lane
            return False
        if size == 1:
            engine.busy, engine.came_s = True, self.clock.now_s
            self._run(lane, [engine])
            return True
        engine.outstanding.add(size)
        members = [self.engines[e] for e in lane.group]
        self._call([*members[1:], engine], partial(self._run, lane, members))
        return True

    def _call(self, members: Sequence[SimEngine], begin: Callable[[], None]) -> None:
        """Send a ticket to engines; what they do then begins when the last of them has come to it."""
        ticket = Ticket(begin, len(members))
        for member in members:
            member.inbox.append(ticket)
        for member in members:
            self._kick(member)

    def _join(self, engine: SimEngine, ticket: Ticket) -> None:
        engine.busy, engine.came_s = True, self.clock.now_s
        ticket.missing -= 1
        if ticket.missing == 0:
            ticket.begin()

    def _run(self, lane: SimLane, engines: Sequence[SimEngine]) -> None:
        plan = lane.plan
        assert plan is not None
        duration_s = self._step_time(lane.size, plan)
        self._on_step(lane, duration_s, plan)
        more = lane.requests > 0 and engines[0].arbiter.announce(lane.size)
        self.clock.after(duration_s, self._ran, lane, engines, duration_s, more)

    def _ran(self, lane: SimLane, engines: Sequence[SimEngine], took_s: float, more: bool) -> None:
        now = self.clock.now_s
        first, ended = lane.finish(now)
        leader = engines[0]
        for engine in engines:
            engine.busy = False
            waited_s = max(0.0, now - took_s - engine.came_s)
            engine.arbiter.ran(lane.size, now, more=more, leads=engine is leader, took_s=took_s, waited_s=waited_s)
        leader.outstanding.discard(lane.size)
        if first or ended:
            self._on_tokens(first, ended)
        for engine in engines:
            self._kick(engine)
        if self._starved:
            self._feed()
