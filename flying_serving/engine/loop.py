"""The loop of an engine: it observes, decides and acts (`run`), and handles messages of other
engines.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.engine import EngineCoreOutputs

from flying_serving.comm.board import StepBoard
from flying_serving.config import FlyingConfig
from flying_serving.engine.block_lending import BlockLending
from flying_serving.engine.group_steps import GroupSteps, LaunchedStep
from flying_serving.engine.host import Host, Inbox
from flying_serving.engine.lane import EngineLanes
from flying_serving.engine.membership import Incarnations, Membership
from flying_serving.engine.messages import BeginAnew, Message, ReturnBlocks, RunStep
from flying_serving.engine.report import Report
from flying_serving.engine.requests import LaneRequests, route_of
from flying_serving.engine.sampled import SampledTokens
from flying_serving.engine.step_log import StepLog
from flying_serving.engine.tracing import EngineTrace
from flying_serving.errors import EngineLost, IntegrityError
from flying_serving.layout.groups import aligned_group
from flying_serving.migration.arrival import Arrival
from flying_serving.migration.host import MigrationHost
from flying_serving.migration.messages import KVPulled, PullKV, ReleaseKV
from flying_serving.migration.migrations import Migrations
from flying_serving.migration.offers import Offers, OfferTable
from flying_serving.migration.source import Source
from flying_serving.scheduling.arbiter import Action, LaneArbiter, ServeMessage, Wait
from flying_serving.weights.lending.engine_weights import EngineWeights

LANE_1_YIELD_S = 0.005
"""Seconds that lane 1 leaves the engine to other lanes when nothing of it could run."""


@dataclass
class Instruments:
    """The parts that only observe an engine."""

    board: StepBoard
    report: Report
    steps: StepLog
    trace: EngineTrace | None


class EngineLoop:
    """One engine: its own lane, its part in each group, and the groups that it leads.

    `kv`: the table of its offers to peers, and its view of theirs. `clock`: CLOCK_MONOTONIC.
    """

    def __init__(
        self,
        engine: int,
        lanes: EngineLanes,
        channel: Inbox,
        host: Host,
        settings: FlyingConfig,
        kv: tuple[OfferTable, Offers],
        instruments: Instruments,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.lanes = lanes
        self.instruments = instruments
        self.arbiter = LaneArbiter(settings.weave_steps, settings.max_pause_ms / 1000)
        self.requests = LaneRequests(lanes, host.add_own, settings.priority_aging_s, clock)
        table, offers = kv
        source = Source(lanes.pools, table)
        self.block_lending = BlockLending(lanes, source, clock)
        migration_host = MigrationHost(
            channel.send, host.call_workers, self.requests.enqueue, self.block_lending.ask
        )
        self.migrations = Migrations(engine, lanes.by_size, source, offers, migration_host)
        self.sampled = SampledTokens(engine, instruments.board)
        self.group_steps = GroupSteps(
            lanes,
            host,
            self.sampled,
            self._member_lost,
            self._output_taken,
            settings.collective_timeout_s,
            clock,
        )
        self.membership: Membership | None = None  # where the server survives the loss of an engine
        self.weights: EngineWeights | None = None  # where weights may be lent
        self.last_step_s = (0.0, 0.0)
        """Begin and end of the last step that this engine took part in, by `clock`."""
        self._channel = channel
        self._host = host
        self.clock = clock
        self._lane_1_ready_at_s = 0.0
        """When lane 1 may step again after a step in which nothing of it could run, by `clock`."""

    def run(self) -> None:
        """Observe, decide, act, until the engine ends."""
        while self._host.serves_on():
            self._observe(None)
            self.lanes.note_loads()
            self._advance_migrations()
            if self.weights:  # weights of a group come and go when its steps are over
                self.group_steps.take_outputs()
                self.weights.advance(self.clock(), self.clock)
            action = self._choose()
            if isinstance(action, Wait):
                if not self.group_steps.take_before_wait():
                    self._emit_stats(self.instruments.report.stats_if_changed(self.clock()))
                    self._observe(action)
            elif isinstance(action, ServeMessage):
                self.serve()
            elif action.size == 1:
                self._step_own()
            else:
                self.block_lending.yield_if_all_are_lent(action.size)
                goes_on = self.arbiter.announce(action.size)
                self._host.emit(
                    self.lanes.leaders[action.size].plan_step(self.clock(), goes_on=goes_on)
                )

    def _observe(self, wait: Wait | None) -> None:
        if self._host.take_messages(wait):
            self._lane_1_ready_at_s = 0.0

    def _advance_migrations(self) -> None:
        """Pull KV for as long as the last step took; without a limit while no lane has requests."""
        began_s, ended_s = self.last_step_s
        hurries = bool(self.migrations.incoming) and self.lanes.active() == 0
        self.migrations.advance(self.clock(), None if hurries else ended_s - began_s)

    def _choose(self) -> Action:
        ready = self._ready_lanes()
        # a lane plans ahead only while no other lane has a step to make: lanes share time by steps
        # that are over
        if self.group_steps.of_other_lanes(ready):
            self.group_steps.take_outputs()
            ready = self._ready_lanes()
        now_s = self.clock()
        action = self.arbiter.choose(now_s, ready, message=self.has_message())
        return self._until_retry(action, now_s) if isinstance(action, Wait) else action

    def _ready_lanes(self) -> dict[int, bool]:
        """Return, by size, whether a lane that this engine leads has a step to make."""
        now_s = self.clock()
        ready = {size: leader.ready(now_s) for size, leader in self.lanes.leaders.items()}
        ready[1] = now_s >= self._lane_1_ready_at_s and self._host.has_own_steps()
        return ready

    def _until_retry(self, wait: Wait, now_s: float) -> Wait:
        """Return a wait that ends when some part of the engine may have something to do."""
        retries_s = [wait.timeout_s, self.migrations.retry_in_s(now_s)]
        retries_s.append(self.group_steps.retry_in_s(now_s))
        retries_s += [leader.retry_in_s(now_s) for leader in self.lanes.leaders.values()]
        parts = (self.weights, self.membership)
        retries_s += [part.retry_in_s(now_s) for part in parts if part is not None]
        if now_s < self._lane_1_ready_at_s and self._host.has_own_steps():
            retries_s.append(self._lane_1_ready_at_s - now_s)
        return Wait(min((retry_s for retry_s in retries_s if retry_s is not None), default=None))

    def has_message(self) -> bool:
        """Return whether a message waits: only then `serve` may be called."""
        return self._channel.pending()

    def serve(self) -> None:
        """Handle the next message, unless its engine or its group is no more."""
        message = self._channel.receive()
        if message is not None and len(message.group) not in self.lanes.broken:
            self.handle(message)

    def handle(self, message: Message) -> None:
        """Carry out a message of another engine, or of this one's leader."""
        size = len(message.group)
        match message:
            case RunStep():
                self._step_group(size, message)
            case BeginAnew():
                self.group_steps.begin_anew(message)
            case PullKV() | KVPulled() | ReleaseKV():
                self.migrations.handle(message)
                self._lane_1_ready_at_s = 0.0
            case _:
                self.block_lending.handle(message)
                if isinstance(message, ReturnBlocks):
                    self._lane_1_ready_at_s = 0.0

    def _step_own(self) -> None:
        self.group_steps.take_outputs()
        began_s = self.clock()
        self._require_weights(1, self.lanes.own_pool.scheduler.get_num_unfinished_requests())
        waits = self.block_lending.recall_if_short()
        if not waits and self._host.step_own():
            self._stepped(1, began_s, more=False, leads=True)
        else:  # older lanes may hold the blocks that it waits for: they step first
            self._lane_1_ready_at_s = self.clock() + LANE_1_YIELD_S

    def _step_group(self, size: int, message: RunStep) -> None:
        self.group_steps.take_outputs(but=size)
        self._require_weights(size, message.plan.total_num_scheduled_tokens)
        self.group_steps.launch(message)

    def _output_taken(self, step: LaunchedStep) -> None:
        """Note a step of a group whose output was taken."""
        message, size = step.message, step.size
        leads = size in self.lanes.leaders
        if not leads:
            self._emit_stats(
                self.instruments.report.stats_if_due(step.began_s, idle=not message.more)
            )
        # a step that was launched while the one before ran begins with its end
        began_s = max(step.began_s, self.last_step_s[1])
        self._stepped(size, began_s, more=message.more, leads=leads, message=message)

    def _member_lost(self, size: int, why: str) -> None:
        if self.membership is None:
            raise EngineLost(why)
        self.membership.failed(size, why, self.clock())

    def _emit_stats(self, stats: Any) -> None:
        """Send statistics that no outputs carry, if there are any."""
        if stats is not None:
            self._host.emit({0: EngineCoreOutputs(scheduler_stats=stats)})

    def _require_weights(self, size: int, work: int) -> None:
        if self.weights is not None and size < self.weights.narrowest and work:
            raise IntegrityError(
                f"engine {self.engine}: a step in lane {size}, whose weights are lent"
            )

    def _stepped(
        self,
        size: int,
        began_s: float,
        *,
        more: bool,
        leads: bool,
        message: RunStep | None = None,
    ) -> None:
        """Note a step that was made. `began_s`: when this engine came to it, maybe before the other
        members. `message`: of a group's step.
        """
        ended_s = self.clock()
        self.last_step_s = (began_s, ended_s)
        if self.migrations.source.running:
            self.migrations.source.publish()
        board, trace = self.instruments.board, self.instruments.trace
        board.ended(self.engine, size, ended_s)
        together_s = board.together_since(aligned_group(self.engine, size), size, began_s)
        took_s, waited_s = max(0.0, ended_s - together_s), max(0.0, together_s - began_s)
        self.arbiter.ran(size, ended_s, more=more, leads=leads, took_s=took_s, waited_s=waited_s)
        if trace is not None:
            trace.stepped(size, message, began_s, ended_s, waited_s)

    def set_peers(self, incarnations: Incarnations) -> None:
        """Take the engines that are there, as the API server says: see `Membership`. Earlier
        messages of others come first.
        """
        assert self.membership is not None
        for _ in range(self._channel.waiting()):
            self.serve()
        self.membership.update(incarnations, self.clock())
        self._lane_1_ready_at_s = 0.0

    def add(self, request: Any, wave: int) -> None:
        """Give a request to its lane, at once or when its KV has arrived."""
        route = route_of(request)
        if route.offer is not None:
            self.migrations.source.offer(request.request_id, route.offer)
        if route.source is None:
            self.requests.enqueue(request, route.size, wave)
        else:
            now_s = self.clock()
            self.migrations.incoming.expect(
                Arrival(request, route.size, route.source, now_s, route.prefetch_tokens)
            )

    def abort(self, request_ids: list[str]) -> None:
        """End requests in any lane that has them or will have them."""
        self.requests.abort(request_ids)
        self.migrations.abort(request_ids)

    def has_work(self) -> bool:
        """Return whether a group that this engine leads has requests, or a message waits. A request
        may be on its way, or an output not taken.
        """
        scheduled = any(leader.has_requests for leader in self.lanes.leaders.values())
        return (
            scheduled
            or bool(self.group_steps)
            or self.has_message()
            or bool(self.migrations.incoming)
        )
