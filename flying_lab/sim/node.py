"""One node in the simulator: the production controller, and the shell that carries its commands to
engines.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Cluster, ClusterShape, StepTime
from flying_lab.sim.engines import weave
from flying_lab.sim.lanes import Finished, SimLane
from flying_lab.sim.lending import WeightOrders
from flying_lab.sim.migrations import KVMigrations
from flying_lab.sim.orders import LayoutOrders
from flying_lab.sim.outcome import LayoutChange, Outcome, Refusal
from flying_lab.sim.parts import SplitParts
from flying_lab.sim.request_sender import MakeSender
from flying_lab.sim.requests import SimRequest, SimStep
from flying_lab.workload.model import Request
from flying_serving.controller.commands import (
    Command,
    Dispatch,
    DispatchPrefix,
    DropPart,
    Fail,
    FetchWeights,
    LendWeights,
    Order,
    PullAhead,
    Recall,
    Reject,
    RevokeOffer,
    Weave,
)
from flying_serving.controller.controller import Controller
from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.requests import ALONE, Origin, RequestSpec
from flying_serving.controller.settings import Settings
from flying_serving.errors import PoolFull, RequestError
from flying_serving.layout.groups import Group, Layout
from flying_serving.predict.steps import Step

TICK_S = 0.1
"""Seconds between two ticks, as of the live server's clock."""
REST_S = 20.0
"""A live clock never stops; this one does after an idle time in which nothing changes any more."""
STUCK_S = 60.0
"""If nothing runs and nothing changes for this long, waiting requests will never run under this
policy.
"""


@dataclass(frozen=True)
class System:
    """A server that can be simulated any number of times.

    Args:
        name: for tables.
        settings: of its controller.
        shape: of its engines.
        step_time: how long their steps take.
        calibration: steps that a live server would have measured at its start.
        placing: how its controller chooses groups; None: as its policy says.
        hint: the output length that the client of a request announces; without it clients announce
            none.
        max_tokens: the cap on the output that clients send, by the actual length. Without it they
            ask for that length (`ignore_eos`), so the server knows it.
        sender: makes the sender of requests to engines, if its controller does not choose them.
        hash_id_tokens: tokens of one hash id of the prompts that prefix caches keep; None if they
            keep nothing.
    """

    name: str
    settings: Settings
    shape: ClusterShape
    step_time: StepTime
    calibration: Sequence[Step]
    placing: type[GroupChoice] | None = None
    hint: Callable[[Request], int] | None = None
    max_tokens: Callable[[int], int] | None = None
    sender: MakeSender | None = None
    hash_id_tokens: int | None = None


class SimNode:
    """A server with its engines on a virtual clock, which nodes may share.

    `on_end` is called with each request that has ended or was refused, instead of keeping it in
    `outcome`.
    """

    def __init__(
        self, system: System, clock: Clock, on_end: Callable[[SimRequest], None] | None = None
    ) -> None:
        settings, shape = system.settings, system.shape
        self.controller = Controller(settings, system.placing)
        self.controller.state.steps.calibrate(system.calibration)
        self.controller.state.migrates = dict(shape.migrations)
        self.clock = clock
        self.shape = shape
        self.cluster = Cluster(shape, system.step_time, clock, self._on_tokens, self._on_step)
        self.cluster.calibrate([step.to_row() for step in system.calibration])
        if system.hash_id_tokens is not None:
            for lane in self.cluster.lanes.values():
                lane.keep_prefixes(system.hash_id_tokens)
        self._migrations = KVMigrations(self.cluster, self._deliver)
        self._orders = LayoutOrders(self.cluster, self.controller, self._carry_out)
        self._weights = WeightOrders(self.cluster, self.controller, self._carry_out)
        self.parts = SplitParts(self.cluster, self._deliver)
        self.sender = (
            None
            if system.sender is None
            else system.sender(self.cluster, lambda: self.controller.state.demand.output_tokens)
        )
        for number, engine in enumerate(self.cluster.engines):
            engine.arbiter.present = len(self.controller.state.layout.group_of(number))
        self.outcome = Outcome(layouts=[LayoutChange(clock.now_s, self.controller.state.layout)])
        self.open: dict[str, SimRequest] = {}
        self._on_end = on_end
        self._hint, self._max_tokens = system.hint, system.max_tokens
        self._learns = settings.policy.splits or settings.policy.pinned_size is None
        self._measured: list[Step] = []
        self._seen_steps = 0
        self._ticking = False
        self._rested_ticks = 0

    def arrive(self, request: Request) -> None:
        """A client sends a request now; the controller hears of it when the API server is done with
        it.
        """
        mine = SimRequest(
            str(request.index),
            request.prompt_tokens,
            request.output_tokens,
            self.clock.now_s,
            hash_ids=request.hash_ids,
        )
        if self.shape.options.keep_times:
            mine.token_s = array("d")
        self.open[mine.request_id] = mine
        origin = ALONE if request.event is None else Origin(event=str(request.event))
        self.clock.after(
            max(0.0, self.shape.frontend_s - self.shape.options.message_s),
            self._admit,
            mine,
            request_spec(request, self._hint, self._max_tokens),
            origin,
        )

    def start(self) -> None:
        """Start the server: its clock begins to tick."""
        self._rested_ticks = 0
        if not self._ticking:
            self._ticking = True
            self.clock.after(TICK_S, self._tick)

    def order(self, layout: Layout, mode: str) -> None:
        """Order a switch as an operator; only one may be under way."""
        self._carry_out(self.controller.begin_switch(layout, mode, None, self.clock.now_s)[1])

    def _admit(self, request: SimRequest, spec: RequestSpec, origin: Origin) -> None:
        try:
            commands = self.controller.arrived(request.request_id, spec, self.clock.now_s, origin)
        except (RequestError, PoolFull) as error:
            self._close(request.request_id, str(error))
            return
        self._carry_out(commands)
        self.start()

    def _tick(self) -> None:
        """Tick as the live server's clock does: measurements, then the controller."""
        if self._learns:
            self.controller.stepped(self._measured)
            self._measured.clear()
            for request in self.open.values():
                if request.group is not None and request.tokens:
                    self.cluster.lanes[request.group].decoding.sync(request)
                    self._report(request)
        self._carry_out(self.controller.tick(self.clock.now_s))
        busy = self.controller.state.running > 0 or self.controller.changeover.is_under_way
        self._rested_ticks = 0 if busy else self._rested_ticks + 1
        if self.open and self._rested_ticks * TICK_S > STUCK_S:
            self._give_up()
        self._ticking = bool(self.open) or self._rested_ticks * TICK_S < REST_S
        if self._ticking:
            self.clock.after(TICK_S, self._tick)

    def _give_up(self) -> None:
        """Refuse waiting requests; a live server would keep them until their clients disconnect."""
        waiting = [state.request_id for state in self.controller.state.pool]
        for request_id in waiting:
            self._close(
                request_id, f"no layout for it in {STUCK_S:.0f} s: the policy never makes one"
            )
        self.controller.finished(waiting, self.clock.now_s, aborted=True)

    def _report(self, request: SimRequest) -> None:
        """Tell the controller of new tokens, except tokens of a prefix, which belong to no
        request.
        """
        if self.parts.is_prefix(request):
            return
        count = request.tokens - request.reported_tokens
        if count:
            self.controller.got_tokens(request.request_id, count, self.clock.now_s)
            request.reported_tokens = request.tokens

    def _on_step(self, lane: SimLane, duration_s: float, step: SimStep) -> None:
        """Keep as many steps as one engine makes: learning from a step costs more time than
        simulating it.
        """
        for request in step.prompts:
            if math.isnan(request.begun_s):
                request.begun_s = self.clock.now_s
            if len(self.controller.state.deadlines):
                self.controller.state.deadlines.drop(self.parts.served_by(request))
        self._seen_steps += 1
        if self._learns and self._seen_steps % self.shape.engines == 0:
            self._measured.append(Step(lane.size, duration_s, *step.counts, step.parallelism))

    def _on_tokens(self, finished: Finished) -> None:
        """Tell the controller, as the live server does: ends first, since what follows from a full
        group may move any request that has not ended.
        """
        now_s = self.clock.now_s
        runs = [run for run in finished.ended if self.sender is None or not self.sender.ended(run)]
        prefixes = [run for run in runs if self.parts.is_prefix(run)]
        over = [run for run in runs if run.ended and run not in prefixes]
        full = [run for run in runs if not run.ended]

        for request in (*finished.first, *over, *full):
            self._report(request)
        for request in over:
            self._close(request.request_id)

        commands: list[Command] = []
        if over:
            commands += self.controller.finished([run.request_id for run in over], now_s)
        for prefix in prefixes:
            request_id = self.parts.prefix_ended(prefix)
            commands += self.controller.prefix_ended(request_id, now_s, failed=False)
        for request in full:
            continuing = self.controller.group_full(request.request_id, now_s)
            assert continuing is not None, "a group holds all tokens of each of its requests"
            commands += continuing
        self._carry_out(commands)

    def _close(self, request_id: str, refusal: str | None = None) -> None:
        """A request is over; `refusal` says why it was not served."""
        request = self.open.pop(request_id)
        if self._on_end is not None:
            self._on_end(request)
        elif refusal is None:
            self.outcome.ended.append(request)
        else:
            self.outcome.refused.append(Refusal(request, refusal))

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Dispatch(request_id) if self.sender is not None:
                    self.controller.state.deadlines.drop(request_id)
                    self.sender.send(self.open[request_id])
                case Dispatch():
                    self._dispatch(command)
                case DispatchPrefix(request_id):
                    self.parts.begin_prefix(self.open[request_id], command)
                case PullAhead(request_id):
                    self.parts.pull_ahead(self.open[request_id], command)
                case DropPart():
                    self.parts.drop(command)
                case Recall(request_id) | RevokeOffer(request_id):
                    self._recall(self.open[request_id])
                case Reject(request_id, waited_s):
                    self._recall(self.open[request_id])
                    self._close(request_id, f"waited {waited_s:.1f} s")
                case Order(switch, weave_steps):
                    self.outcome.layouts.append(LayoutChange(self.clock.now_s, switch.new))
                    self.outcome.switches.append(switch)
                    self._orders.send(switch, weave_steps)
                case Weave(engines):
                    told = [self.cluster.engines[engine] for engine in sorted(engines)]
                    self.clock.after(self.shape.options.message_s, weave, told, self.cluster.kick)
                case LendWeights():
                    self.outcome.loans.append(self.clock.now_s)
                    self._weights.tell(command)
                case FetchWeights():
                    self._weights.tell(command)
                case Fail(request_id, why):
                    self._recall(self.open[request_id])
                    self._close(request_id, why)
                case _:
                    assert_never(command)

    def _dispatch(self, command: Dispatch) -> None:
        """Send a request to a group, with its KV if it comes with it."""
        request, kv = self.open[command.request_id], command.migrated_from
        request.limit_tokens = command.limit_tokens
        if not self.parts.go_on(command):
            self._migrations.send(request, kv.group if kv else None, command.group)

    def _recall(self, request: SimRequest) -> None:
        """Take a request from its group, which may not have got it yet."""
        self.cluster.remove(request)
        self.parts.recall(request)

    def _deliver(self, request: SimRequest, group: Group) -> None:
        """Give a request to a group, unless it was dispatched elsewhere meanwhile."""
        if request.group is None and self.controller.state.group_of(request.request_id) == group:
            self.cluster.add(group, request)


def request_spec(
    request: Request,
    hint: Callable[[Request], int] | None,
    max_tokens: Callable[[int], int] | None,
) -> RequestSpec:
    """Return the facts that the controller gets about a request, as the live server finds them
    in what a client sends. `hint`, `max_tokens`: see System.
    """
    prompt, output = request.prompt_tokens, request.output_tokens
    expected = None if hint is None else hint(request)
    if max_tokens is None:
        most, sure, held = max(output, expected or 0), output, None
    else:
        most, sure = max(output, max_tokens(output)), 1
        held = prompt + most
    return RequestSpec(
        prompt,
        prompt + sure,
        most,
        request.tp_degree,
        request.priority,
        request.deadline_s,
        expected_tokens=expected,
        most_tokens=held,
    )
