"""One engine of production classes, taken apart into what it may do next: hear, go once through its
loop, step.

Its loop is the production loop, and so is everything that it calls, but for what is vLLM's: the
scheduler is a small one, the model writes down whose token is in which block, and nothing goes to a
client.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from vllm.v1.engine import EngineCoreOutputs

from flying_serving.config import FlyingConfig
from flying_serving.engine.lane import EngineLanes, LaneFactory
from flying_serving.engine.loop import EngineLoop, Instruments
from flying_serving.engine.messages import Message, RunStep
from flying_serving.engine.utilities import EngineUtilities
from flying_serving.layout.groups import Group, aligned_group
from flying_serving.migration.arrival import ArrivalPhase
from flying_serving.migration.source import RETAIN_S
from flying_serving.migration.target import BLOCKS_WAIT_S, OPENING_S, STALLED_S
from flying_serving.migration.transfer import pull_kv
from flying_serving.vllm_adapter.keys import AHEAD_KEY, LANE_KEY, MIGRATED_FROM_KEY, OFFER_KEY
from flying_serving.vllm_adapter.kv.blocks import SchedulerPool
from flying_serving.vllm_adapter.kv.engine_pool import EnginePool
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.weights.lending import lent_memory as lent
from flying_serving.wire import EngineMemory
from tests.with_vllm.engine.schedulers import BLOCK, FakeScheduler, Hooks, Request
from tests.with_vllm.protocol.alike import forget_times, rename_blocks
from tests.with_vllm.protocol.broken_sampling import break_sampling
from tests.with_vllm.protocol.broken_weights import break_weights
from tests.with_vllm.protocol.client import Abort, ClientMessage, Job, Retain, TellWeights
from tests.with_vllm.protocol.doubles import (
    NOW_S,
    PAUSE_S,
    TICK_S,
    Board,
    Entered,
    Inbox,
    Nothing,
    Reading,
    now,
)
from tests.with_vllm.protocol.faults import Fault, inject
from tests.with_vllm.protocol.memory import EndlessScheduler, ListPool, Memory
from tests.with_vllm.protocol.offers import Peers, Table, View
from tests.with_vllm.protocol.sampling import Draw, Samples
from tests.with_vllm.protocol.settings import ANSWERED, Overdue, Settings, Took
from tests.with_vllm.protocol.weights import Device, Weights, extra_of, make_weights

_SAME = Draw()


class Engine:
    """A production loop, and in place of vLLM's engine its host.

    Args:
        number: of this one.
        settings: what all of them are made with.
        fault: what is broken.
        mobile: requests whose KV goes from one group to another.
        sizes: of the groups that offer KV, by number of the offer.
    """

    def __init__(
        self,
        number: int,
        settings: Settings,
        fault: Fault | None = None,
        mobile: Container[str] = (),
        sizes: Mapping[int, int] | None = None,
    ) -> None:
        self.number, self.settings = number, settings
        self.channel = Inbox()
        self.memory, self.table, self.peers = (
            Memory(settings.all_blocks, mobile),
            Table(sizes or {}),
            Peers(),
        )
        self.overdue: dict[int, int] = {}
        """By size, for older lanes that are led here, have work and are due: steps of others made
        here since then.
        """
        self.samples = Samples()
        self.given: tuple[str, ...] = ()
        """Requests of a group of which tokens were given out."""
        self.failed: tuple[str, ...] = ()
        """Requests that were ended with an error."""
        self._rounds = 0
        self._aborting: tuple[str, ...] = ()
        self._views: list[View] = []
        own = EnginePool(self._make_scheduler((number,)))
        table: Any = self.table
        factory = LaneFactory(number, own, self.channel, table, settings.lend_blocks)
        lanes = [factory.own_lane(BLOCK, None)]
        for size in settings.sizes[1:]:
            group = aligned_group(number, size)
            lanes.append(factory.group_lane(group, BLOCK, None, partial(self._make_pool, group)))
        board: Any = Board(self)
        nothing: Any = Nothing()
        trace: Any = self
        instruments = Instruments(board, nothing, nothing, trace)
        flying = FlyingConfig(weave_steps=1, max_pause_ms=PAUSE_S * 1000)
        kv: Any = (self.table, self.peers)
        self.loop = EngineLoop(
            number, EngineLanes(lanes, board), self.channel, self, flying, kv, instruments, now
        )
        self.loop.migrations.target.chunks.blocks = 1
        # block by block, while something else runs
        self.loop.migrations.target.chunks.token_s = dict.fromkeys(settings.sizes, 1.0)
        inject(fault, self.loop.migrations, self.table)
        break_sampling(fault, self.loop)
        for size, scheduler in self.schedulers.items():
            scheduler.hooks = Hooks(
                blocks_freed=partial(self.loop.migrations.source.blocks_freed, size)
            )
        if settings.pieces:
            self._lend(own, fault)

    def _lend(self, own: Any, fault: Fault | None) -> None:
        """Let there be weights that can be lent."""
        extra = extra_of(self.settings.blocks, self.settings.pieces)
        self.table.extra = extra
        self.device = Device(self.memory, self.settings.pieces, extra)
        loop = self.loop
        revoke = loop.migrations.source.revoke_all
        loop.weights = make_weights(
            loop.lanes, own, self.settings.pieces, extra, self.call_workers, revoke
        )
        break_weights(fault, loop.weights, self.memory)

    @property
    def weights(self) -> Weights | None:
        """What it has of its weights, if they may be lent."""
        weights = self.loop.weights
        assert weights is None or isinstance(weights, Weights)
        return weights

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on with what it did."""
        vars(self).update(state)
        if self.weights is not None:
            self.weights.resume()

    def _make_pool(self, group: Group) -> SchedulerPool:
        return SchedulerPool(self._make_scheduler(group))

    def _make_scheduler(self, group: Group) -> Any:
        blocks, endless = self.settings.all_blocks, self.settings.endless
        if endless:
            return EndlessScheduler(blocks, pool=ListPool(blocks), busy=group in endless)
        return FakeScheduler(blocks, pool=ListPool(blocks), budget=self.settings.chunk)

    @property
    def schedulers(self) -> dict[int, Any]:
        """The schedulers on this engine, by size."""
        return self.loop.lanes.schedulers

    # ---- the host of the loop

    def serves_on(self) -> bool:
        """One round at a time."""
        self._rounds -= 1
        return self._rounds >= 0

    def take_messages(self, wait: Any) -> bool:
        """Nothing is heard within a round."""
        assert wait is None or wait.timeout_s is None or wait.timeout_s >= 0, (
            f"waits for {wait.timeout_s} s"
        )
        return False

    def has_own_steps(self) -> bool:
        """Whether lane 1 has something to step."""
        return bool(self.schedulers[1].has_requests())

    def step_own(self) -> bool:
        """A step of lane 1."""
        plan = self.schedulers[1].schedule()
        self._write(1, plan)
        self.schedulers[1].update_from_output(plan, None)
        return bool(plan.total_num_scheduled_tokens)

    def _write(self, size: int, plan: Any) -> None:
        """What a step does in a lane: it needs weights if it computes anything."""
        has_weights = (
            self.weights is None or size == self.settings.sizes[-1] or not self.device.gone
        )
        assert has_weights or not plan.num_scheduled_tokens, (
            f"a step in lane {size}, whose weights are gone"
        )
        self.memory.write(plan, other=self.samples.is_other)

    def add_own(self, request: Any, wave: int) -> None:
        """To lane 1's scheduler."""
        self.schedulers[1].add_request(request)

    def process_aborts(self) -> None:
        """Those that arrive while a step is made."""
        self.loop.abort(list(self._aborting))

    def emit(self, outputs: Any) -> None:
        """Note what goes to a client: the outputs of a step of a group, or ends with an error."""
        match (outputs or {}).get(0):
            case ("outputs of", names):
                self.given = tuple(names)
            case EngineCoreOutputs() as message:
                self.failed += tuple(end.request_id for end in message.outputs)

    def call_lane(self, size: int, function: Callable[..., Any], *args: Any) -> Any:
        """What the workers do in a lane, all of which are one memory."""
        if function is DeviceLane.execute:
            self._write(size, args[0])
            return self.samples.output(size, args[0])
        assert function is DeviceLane.begin_anew
        return self.samples.begin_anew(size, *args)

    def call_workers(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the workers do beside steps."""
        if function in (lent.drop_next, lent.fetch_next, lent.copy_blocks, lent.release_blocks):
            return function(self.device, *args)
        assert function is pull_kv
        return self._pull_kv(*args)

    def _pull_kv(
        self,
        source_blocks: Mapping[int, Sequence[int]],
        group: Group,
        blocks: list[int],
        tokens: range,
        completes: bool,
    ) -> None:
        """Copy whatever is there; in lane 1 some time after the offer was read."""
        if len(group) == 1:
            self._look_again()
        self.memory.take(
            blocks,
            tokens,
            self.peers.copy(tuple(source_blocks), source_blocks, (group, self.number), tokens),
        )

    def _look_again(self) -> None:
        """Look at other engines at the next time. Raises Reading if that has not come yet."""
        if not self._views:
            raise Reading
        self.peers.view = dict(self._views.pop(0))

    # ---- what observes it

    def stepped(self, size: int, *_: Any) -> None:
        """As its trace: look which lanes are due after a step."""
        arbiter = self.loop.arbiter
        ready = {1: self.has_own_steps()} | {
            s: one.ready(NOW_S) for s, one in self.loop.lanes.leaders.items()
        }
        paused_s = {other: NOW_S - arbiter._stepped_at_s.get(other, NOW_S) for other in ready}
        due = [
            s
            for s in ready
            if ready[s] and s not in (size, arbiter.present) and paused_s[s] >= PAUSE_S
        ]
        self.overdue = {other: self.overdue.get(other, 0) + 1 for other in due}

    def ordered(self, *_: Any) -> None:
        """As its trace: an order is nothing to look at."""

    def pass_time(self) -> None:
        """Let a tick pass."""
        loop = self.loop
        loop.arbiter._stepped_at_s = {
            size: at - TICK_S for size, at in loop.arbiter._stepped_at_s.items()
        }
        loop.arbiter._hold_until_s -= TICK_S
        loop.arbiter._older_paused_until_s -= TICK_S
        loop._lane_1_ready_at_s -= TICK_S
        if loop.block_lending._short_since_s is not None:
            loop.block_lending._short_since_s -= TICK_S
        for leader in loop.lanes.leaders.values():
            leader._may_step_at_s -= TICK_S
            leader._may_ask_at_s -= TICK_S
        for member in loop.lanes.members.values():
            member._reclaimed_at_s -= TICK_S

    # ---- what may happen

    def hear(self, client_message: ClientMessage, view: View = ()) -> None:
        """Handle what the client sent; `view`: of other engines."""
        self.peers.view = dict(view)
        utilities = EngineUtilities(self.weights, EngineMemory(0, 0), self.loop, 0, [], [])
        match client_message:
            case Job(name, size):
                extra: dict[str, Any] = {LANE_KEY: size}
                source = client_message.source
                if source is not None:
                    extra[MIGRATED_FROM_KEY] = (source.group[0], len(source.group), source.number)
                    extra[AHEAD_KEY] = client_message.ahead
                if client_message.offer is not None:
                    extra[OFFER_KEY] = client_message.offer
                request = Request(name, client_message.prompt, client_message.tokens)
                request.sampling_params = SimpleNamespace(extra_args=extra)
                self.loop.add(request, 0)
            case Abort(name):
                self.loop.abort([name])
                self._is_without(name)
            case Retain(name, number):
                utilities.flying_retain([(name, number)] if name else [])
                self._is_without(name)
            case TellWeights(what):
                assert self.weights is not None
                self.weights.begin(what)
            case _:
                group = list(aligned_group(self.number, client_message.size))
                utilities.flying_switch(group, client_message.mode, 1, NOW_S)

    def _is_without(self, name: str) -> None:
        """Nobody wants the request here any more: it must not go on."""
        arriving = self.loop.migrations.incoming.by_id
        here = [request_id for request_id, arrival in arriving.items() if not arrival.has_ended]
        here += [
            running for scheduler in self.schedulers.values() for running in scheduler.requests
        ]
        assert name not in here, f"{name} goes on, though nobody wants it here any more"

    def go_on(
        self, message: Message | None, ticks: int, overdue: Overdue, views: Sequence[View]
    ) -> Took:
        """Go once through the loop, after a number of ticks, with a message or none.

        `views`: of other engines; each but the first when it copies what it read in the one before.
        """
        for _ in range(ticks):
            self.pass_time()
        migrations = self.loop.migrations
        for arrival in migrations.incoming.by_id.values() if overdue.arrivals else ():
            if arrival.phase is ArrivalPhase.EXPECTED:
                arrival.last_progress_s -= OPENING_S + TICK_S if self.settings.stalls else 0.0
            else:
                arrival.last_progress_s -= TICK_S + (
                    STALLED_S if self.settings.stalls else BLOCKS_WAIT_S
                )
        is_overdue = overdue.retained and not self.settings.retains
        for retained in migrations.source.retained.values() if is_overdue else ():
            retained.idle_since_s = NOW_S - RETAIN_S - TICK_S
        if self.weights is not None:
            self.weights._next_piece_at_s = 0.0 if overdue.weights else NOW_S + TICK_S
        self.channel.next = message
        self._views = list(views)
        self._look_again()
        self._rounds = 1
        try:
            self.loop.run()
        except Entered:
            return Took.ENTERED
        except Reading:
            return Took.READ
        return Took.NOT if self.channel.next is message else Took.SERVED

    def step(
        self, message: RunStep, aborting: tuple[str, ...], view: View, draw: Draw = _SAME
    ) -> None:
        """Make a step of a group that all members have entered; aborts arrive while it is made."""
        self._aborting, self.peers.view = aborting, dict(view)
        self.samples.begin_step(draw)
        self.loop.handle(message)
        self._aborting = ()
        self.samples.begin_step(_SAME)

    def settle(self) -> tuple[str, ...]:
        """Forget what can make no difference any more. Returns the requests that were completed."""
        self._views, self.peers.view = [], {}
        done = tuple(name for scheduler in self.schedulers.values() for name in scheduler.done)
        for scheduler in self.schedulers.values():
            scheduler.done, scheduler.outputs = [], []
        if self.weights is not None and self.weights.take_answer():
            done = (*done, ANSWERED)
        self.given = self.failed = ()
        self.samples.forget_steps(self.loop.sampled)
        forget_times(self)
        rename_blocks(self)
        return done
