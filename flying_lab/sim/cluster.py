"""The engines of one node on a virtual clock, which step alone and in groups."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flying_lab.sim.clock import Clock
from flying_lab.sim.decoding import DecodeBatch
from flying_lab.sim.engines import Collective, SimEngine, SimOrder, turn_s
from flying_lab.sim.host import NO_TIME, HostTime
from flying_lab.sim.lanes import Finished, SimLane
from flying_lab.sim.loans import Loan
from flying_lab.sim.requests import BlockPool, GroupBlocks, SimRequest, SimStep
from flying_serving.config import MIGRATING_MODES
from flying_serving.controller.settings import Limits
from flying_serving.errors import ConfigError
from flying_serving.layout.groups import Group, Layout
from flying_serving.parallelism import Parallelism
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.parallelism import ParallelismChoice
from flying_serving.scheduling.arbiter import LaneArbiter, ServeMessage, StepLane
from flying_serving.scheduling.batches import Batches
from flying_serving.wire import CalibrationRow, StepRow

SHORTEST_S = 1e-6
"""Shortest wait: a shorter one may be lost in rounding, and time would not pass."""

StepTime = Callable[[int, SimStep], float]
"""(group size, contents of the step) -> seconds."""


@dataclass(frozen=True)
class Options:
    """Options of all systems that are compared. The defaults are vLLM's for a server on large
    devices, and ours.

    Args:
        max_num_seqs, max_num_batched_tokens: per engine or group, as in vLLM.
        horizon_s, weave_steps, max_pause_s, lend_weights: as in the server's settings.
        slo_s: targets of TTFT and TPOT that the policy decides by.
        message_s: between the API server and an engine, one way.
        keep_times: whether the time of each token is kept.
        tbt_slo_s: the most time of a step, which limits its prompt tokens; infinite without a
            target.
        token_parallel: whether groups of ours on modelled devices may divide the tokens of a step.
            Those that lend weights never do.
    """

    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    horizon_s: float = 20.0
    slo_s: tuple[float, float] = (math.inf, math.inf)
    weave_steps: int = 1
    max_pause_s: float = 1.0
    message_s: float = 0.0005
    keep_times: bool = True
    tbt_slo_s: float = math.inf
    lend_weights: bool = False
    token_parallel: bool = True

    def __post_init__(self) -> None:
        """Check that every running request gets a token from each step, as in vLLM."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            least = f"must be at least max_num_seqs={self.max_num_seqs}"
            raise ConfigError(f"max_num_batched_tokens={self.max_num_batched_tokens}: {least}")


@dataclass(frozen=True)
class ClusterShape:
    """The shape of a simulated node.

    Args:
        engines: their number.
        blocks: KV blocks per engine, vLLM's null block among them.
        block_tokens: by group size, tokens in one block.
        options: of its server.
        frontend_s: the API server's addition to a request's first token outside of steps, messages
            included.
        recomputes: a hard switch throws KV away, so that paused requests are computed again.
        switch_s: how long an engine does nothing when its group changes.
        migrations: cost of KV migration by the size of the group that pulls; without, KV does not
            migrate.
        loan: weights that engines of the widest group may lend.
        turns: by group size, how long devices wait where a member's last step was of another lane;
            without, they do not.
    """

    engines: int
    blocks: int
    block_tokens: Mapping[int, int]
    options: Options
    frontend_s: float = 0.0
    recomputes: bool = False
    switch_s: float = 0.0
    migrations: Mapping[int, MigrationCost] = field(default_factory=dict)
    loan: Loan | None = None
    turns: Mapping[int, HostTime] = field(default_factory=dict)


class Cluster:
    """The engines of one node on a virtual clock, which nodes may share.

    `on_tokens` is called with the requests that got their first token of a lane and the requests
    that have ended. `on_step` is called with a lane, the seconds of the step that it begins, and
    its contents.
    """

    def __init__(
        self,
        shape: ClusterShape,
        step_time: StepTime,
        clock: Clock,
        on_tokens: Callable[[Finished], None],
        on_step: Callable[[SimLane, float, SimStep], None],
    ) -> None:
        self.shape = shape
        self.clock = clock
        self._step_time = step_time
        self._on_tokens = on_tokens
        self._on_step = on_step
        options = shape.options
        self.engines = [
            SimEngine(LaneArbiter(options.weave_steps, options.max_pause_s))
            for _ in range(shape.engines)
        ]
        self.pools = [BlockPool(shape.blocks - 1, shape.blocks - 1) for _ in range(shape.engines)]
        self.lanes: dict[Group, SimLane] = {}
        self._starved: dict[Group, None] = {}
        self._choice: ParallelismChoice | None = None
        limits = Limits(options.max_num_seqs, options.max_num_batched_tokens)
        for size, block_tokens in sorted(shape.block_tokens.items()):
            for group in Layout.uniform(shape.engines, size).groups:
                blocks = GroupBlocks([self.pools[engine] for engine in group], block_tokens)
                lane = SimLane(group, blocks, DecodeBatch(block_tokens, options.keep_times), limits)
                self.lanes[group] = self.engines[group[0]].lanes[size] = lane

    def calibrate(self, measured: Sequence[CalibrationRow]) -> None:
        """Take the steps that were measured at start. From them leaders choose what a step divides,
        and lanes keep to a target for the time between two tokens, if the options have it.
        """
        options = self.shape.options
        if any(row.parallelism is Parallelism.TOKEN for row in measured):
            self._choice = ParallelismChoice(measured)
        if options.tbt_slo_s == math.inf:
            return
        for engine in self.engines:
            least = min(self.shape.block_tokens.values())
            batches = Batches(
                options.tbt_slo_s, options.max_num_batched_tokens, least, engine.active_lanes
            )
            batches.calibrate(measured)
            for lane in engine.lanes.values():
                lane.batches = batches

    def add(self, group: Group, request: SimRequest) -> None:
        """Give a request to the leader of a group, with the KV of its `computed_tokens`."""
        self.lanes[group].add(request)
        self.kick(self.engines[group[0]])

    def remove(self, request: SimRequest) -> None:
        """Take a request from its group, if it has one."""
        if request.group is not None:
            self.lanes[request.group].remove(request)
            request.left_s = self.clock.now_s
            self._wake_starved()

    def together(
        self, group: Group, duration_s: float, done: Callable[..., None], *args: Any
    ) -> None:
        """Join all engines of a group at their next step boundaries. They do no other work for a
        duration.
        """
        members = [self.engines[engine] for engine in group]
        self._send(
            members, partial(self.clock.after, duration_s, self._done_together, members, done, args)
        )

    def _done_together(
        self, engines: Sequence[SimEngine], done: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        done(*args)
        self._free(engines)

    def order(self, engine: int, order: SimOrder) -> None:
        """Give an order to an engine; it takes effect at its next step boundary."""
        self.engines[engine].orders.append(order)
        self.kick(self.engines[engine])

    def announce_migrations(self) -> None:
        """Tell engines which requests migrate. All other requests may go on."""
        for engine in self.engines:
            if engine.awaits_announcement:
                engine.awaits_announcement = False
                self.kick(engine)

    def _free(self, engines: Sequence[SimEngine]) -> None:
        """Free engines, and let each choose its next work."""
        for engine in engines:
            engine.busy = False
        for engine in engines:
            self.kick(engine)

    def _carry_out(self, engine: SimEngine, order: SimOrder) -> bool:
        """Carry out an order. Returns whether this engine's group changes."""
        now_s, changes, hard = (
            self.clock.now_s,
            order.size != engine.arbiter.present,
            order.mode == "hard",
        )
        if hard and self.shape.recomputes:
            for size, lane in engine.lanes.items():
                if size != order.size:
                    lane.preempt_all()
        engine.arbiter.switch(order.size, hard=hard, weave_steps=order.weave_steps, now_s=now_s)
        engine.awaits_announcement = order.mode in MIGRATING_MODES and changes
        order.done(now_s)
        return changes

    def kick(self, engine: SimEngine) -> None:
        """Let an engine that is free choose its next work."""
        if engine.busy:
            return
        if engine.orders:
            orders, engine.orders = engine.orders, []
            changes = [self._carry_out(engine, order) for order in orders]
            if self.shape.switch_s and any(changes):
                engine.busy = True
                self.clock.after(self.shape.switch_s, self._free, [engine])
                return
        if engine.weights is not None and (piece_s := engine.weights.advance(self.clock.now_s)):
            engine.busy = True
            self.clock.after(piece_s, self._free, [engine])
            return
        starved: tuple[int, ...] = ()
        while isinstance(choice := engine.choose(self.clock.now_s, starved), StepLane):
            if self._begin(engine, choice.size):
                return
            starved += (choice.size,)
        if isinstance(choice, ServeMessage):
            self._enter(engine, engine.inbox.popleft())
        elif choice.timeout_s is not None:
            self._wake(engine, self.clock.now_s + max(choice.timeout_s, SHORTEST_S))

    def _wake(self, engine: SimEngine, time_s: float) -> None:
        if not self.clock.now_s < engine.wakes_at_s <= time_s:
            engine.wakes_at_s = time_s
            self.clock.at(time_s, self.kick, engine)

    def _wake_starved(self) -> None:
        """Wake lanes that lacked blocks, perhaps on engines that do not lead them: some blocks are
        free.
        """
        starved, self._starved = self._starved, {}
        for group in starved:
            self.kick(self.engines[group[0]])

    def _begin(self, engine: SimEngine, size: int) -> bool:
        """Begin a step of a lane that an engine leads; False if the lane lacks blocks."""
        lane = engine.lanes[size]
        if lane.begin() is None:
            self._starved[lane.group] = None
            return False
        if size == 1:
            engine.busy, engine.entered_s = True, self.clock.now_s
            self._run(lane, [engine])
            return True
        engine.outstanding.add(size)
        members = [self.engines[e] for e in lane.group]
        self._send([*members[1:], engine], partial(self._run, lane, members))
        return True

    def _send(self, members: Sequence[SimEngine], begin: Callable[[], None]) -> None:
        """Send a collective to its members."""
        collective = Collective(begin, len(members))
        for member in members:
            member.inbox.append(collective)
        for member in members:
            self.kick(member)

    def _enter(self, engine: SimEngine, collective: Collective) -> None:
        engine.busy, engine.entered_s = True, self.clock.now_s
        collective.missing -= 1
        if collective.missing == 0:
            collective.begin()

    def _run(self, lane: SimLane, engines: Sequence[SimEngine]) -> None:
        step = lane.step
        assert step is not None
        if self._choice is not None and lane.size > 1:
            step.parallelism = self._choice.choose(lane.size, *step.counts)
        turn = self.shape.turns.get(lane.size, NO_TIME)
        took_s = self._step_time(lane.size, step) + turn_s(engines, lane.size, step, turn)
        if lane.batches is not None:
            lane.batches.stepped(StepRow(lane.size, took_s, *step.counts, False, step.parallelism))
        self._on_step(lane, took_s, step)
        more = lane.requests > 0 and engines[0].arbiter.announce(lane.size)
        self.clock.after(took_s, self._ran, lane, engines, took_s, more)

    def _ran(self, lane: SimLane, engines: Sequence[SimEngine], took_s: float, more: bool) -> None:
        now_s, leader = self.clock.now_s, engines[0]
        finished = lane.finish(now_s)
        for engine in engines:
            engine.busy = False
            waited_s = max(0.0, now_s - took_s - engine.entered_s)
            engine.arbiter.ran(
                lane.size,
                now_s,
                more=more,
                leads=engine is leader,
                took_s=took_s,
                waited_s=waited_s,
            )
        leader.outstanding.discard(lane.size)
        if finished.first or finished.ended:
            self._on_tokens(finished)
        for engine in engines:
            self.kick(engine)
        if self._starved:
            self._wake_starved()
