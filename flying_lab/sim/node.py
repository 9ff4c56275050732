"""One node in the simulator: the production controller, and a shell around it that carries its
commands to engines.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, assert_never

from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Cluster, ClusterShape, StepTime
from flying_lab.sim.engines import weave
from flying_lab.sim.lanes import Finished, SimLane
from flying_lab.sim.lending import WeightOrders
from flying_lab.sim.migrations import KVMigrations
from flying_lab.sim.orders import LayoutOrders
from flying_lab.sim.request_sender import MakeSender, RequestSender
from flying_lab.sim.requests import SimRequest, SimStep
from flying_lab.sim.splits import Splits, Splitting
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
    Weave,
)
from flying_serving.controller.controller import Controller
from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.places import ALONE, Origin
from flying_serving.controller.requests import RequestSpec
from flying_serving.controller.settings import Settings
from flying_serving.controller.switches import Switch
from flying_serving.errors import PoolFull, RequestError
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.split import Terms
from flying_serving.predict.steps import Step

TICK_S = 0.1
"""As the live server's clock."""
REST_S = 20.0
"""A live clock never stops; this one does after an idle time in which nothing changes any more."""
STUCK_S = 60.0
"""If nothing runs and nothing changes for this long, waiting requests will never run under this
policy.
"""


class Refusal(NamedTuple):
    """A request that was not served."""

    request: SimRequest
    reason: str


class LayoutChange(NamedTuple):
    """The controller's layout from a time on."""

    at_s: float
    layout: Layout


@dataclass
class Outcome:
    """What became of the requests of a node, its layouts and switches, and when weights began to be
    lent.
    """

    ended: list[SimRequest] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    layouts: list[LayoutChange] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    loans: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class System:
    """A server that can be simulated any number of times.

    Args:
        name: for tables.
        settings: of its controller.
        shape: of its engines.
        step_time: how long their steps take.
        calibration: steps that a live server would have measured at its start.
        placing: how its controller chooses groups.
        splitting: how it splits requests over two groups, if it does.
        sender: makes what sends requests to engines, if its controller does not decide that.
        hash_id_tokens: tokens of one hash id of the prompts that prefix caches keep; None if they
            keep nothing.
    """

    name: str
    settings: Settings
    shape: ClusterShape
    step_time: StepTime
    calibration: Sequence[Step]
    placing: type[GroupChoice] = GroupChoice
    splitting: Splitting | None = None
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
        if shape.options.tbt_slo_s < math.inf:
            self.cluster.limit_batches([step.to_row() for step in system.calibration])
        if system.hash_id_tokens is not None:
            for lane in self.cluster.lanes.values():
                lane.keep_prefixes(system.hash_id_tokens)
        self._migrations = KVMigrations(self.cluster, self._deliver)
        self._orders = LayoutOrders(self.cluster, self.controller, self._carry_out)
        self._weights = None if shape.loan is None else WeightOrders(self.cluster, shape.loan)
        self.splits = None if system.splitting is None else self._splits(system.splitting)
        self.sender = self.splits if system.sender is None else self._sender(system.sender)
        for number, engine in enumerate(self.cluster.engines):
            engine.arbiter.present = len(self.controller.state.layout.group_of(number))
        self.outcome = Outcome(layouts=[LayoutChange(clock.now_s, self.controller.state.layout)])
        self.open: dict[str, SimRequest] = {}
        self._on_end = on_end
        self._learns = settings.policy.pinned_size is None
        self._measured: list[Step] = []
        self._seen_steps = 0
        self._ticking = False
        self._rested_ticks = 0

    def _splits(self, splitting: Splitting) -> Splits:
        options, (size,) = self.shape.options, self.shape.block_tokens
        block_tokens = self.shape.block_tokens[size]

        def terms() -> Terms:
            lane = self.controller.state.lanes()[size]
            return Terms(lane, splitting.handoff, block_tokens, options.tbt_slo_s)

        return Splits(
            self.cluster, splitting, terms, lambda: self.controller.state.demand.output_tokens
        )

    def _sender(self, make: MakeSender) -> RequestSender:
        return make(self.cluster, lambda: self.controller.state.demand.output_tokens)

    def arrive(self, request: Request) -> None:
        """A client sends a request now; the controller hears of it when the API server is done with
        it.
        """
        prompt, output = request.prompt_tokens, request.output_tokens
        mine = SimRequest(
            str(request.index), prompt, output, self.clock.now_s, hash_ids=request.hash_ids
        )
        if self.shape.options.keep_times:
            mine.token_s = array("d")
        spec = RequestSpec(
            prompt, prompt + output, output, request.tp_degree, request.priority, request.deadline_s
        )
        self.open[mine.request_id] = mine
        origin = ALONE if request.event is None else Origin(event=str(request.event))
        self.clock.after(
            max(0.0, self.shape.frontend_s - self.shape.options.message_s),
            self._admit,
            mine,
            spec,
            origin,
        )

    def start(self) -> None:
        """The server is up: its clock begins to tick."""
        self._rested_ticks = 0
        if not self._ticking:
            self._ticking = True
            self.clock.after(TICK_S, self._tick)

    def order(self, layout: Layout, mode: str) -> None:
        """An operator orders a switch; only one may be under way."""
        self._carry_out(self.controller.order(layout, mode, None, self.clock.now_s)[1])

    def _admit(self, request: SimRequest, spec: RequestSpec, origin: Origin) -> None:
        try:
            commands = self.controller.arrived(request.request_id, spec, self.clock.now_s, origin)
        except (RequestError, PoolFull) as error:
            self._close(request.request_id, str(error))
            return
        self._carry_out(commands)
        self.start()

    def _tick(self) -> None:
        """As the live server's clock: measurements, then the controller."""
        if self._learns:
            self.controller.stepped(self._measured)
            self._measured.clear()
            for request in self.open.values():
                if request.group is not None and request.tokens:
                    self.cluster.lanes[request.group].decoding.sync(request)
                    self._report(request)
        self._carry_out(self.controller.tick(self.clock.now_s))
        busy = self.controller.state.running > 0 or self.controller.changing
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
        count = request.tokens - request.reported_tokens
        if count:
            self.controller.tokens(request.request_id, count, self.clock.now_s)
            request.reported_tokens = request.tokens

    def _on_step(self, lane: SimLane, duration_s: float, step: SimStep) -> None:
        """Keep as many steps as one engine makes: learning from a step costs more time than
        simulating it.
        """
        for request in step.prompts if len(self.controller.state.deadlines) else ():
            self.controller.state.deadlines.drop(request.request_id)
        self._seen_steps += 1
        if self._learns and self._seen_steps % self.shape.engines == 0:
            context, pairs = step.context_tokens, step.prefill_pairs
            self._measured.append(
                Step(lane.size, duration_s, step.prefill_tokens, step.sequences, context, pairs)
            )

    def _on_tokens(self, finished: Finished) -> None:
        for request in finished.first:
            self._report(request)
        over = [run for run in finished.ended if self.sender is None or not self.sender.ended(run)]
        for request in over:
            self._report(request)
            self._close(request.request_id)
        if over:
            ended = [request.request_id for request in over]
            self._carry_out(self.controller.finished(ended, self.clock.now_s))

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
                case Dispatch(request_id, group, migrated_from=source):
                    self._migrations.send(
                        self.open[request_id], source.group if source else None, group
                    )
                case Recall(request_id, _):
                    self.cluster.remove(self.open[request_id])
                case Reject(request_id, waited_s, group):
                    if group is not None:
                        self.cluster.remove(self.open[request_id])
                    self._close(request_id, f"waited {waited_s:.1f} s")
                case Order(switch, weave_steps):
                    self.outcome.layouts.append(LayoutChange(self.clock.now_s, switch.new))
                    self.outcome.switches.append(switch)
                    self._orders.send(switch, weave_steps)
                case Weave(engines):
                    told = [self.cluster.engines[engine] for engine in sorted(engines)]
                    self.clock.after(self.shape.options.message_s, weave, told, self.cluster.kick)
                case LendWeights(group):
                    self.outcome.loans.append(self.clock.now_s)
                    self._lent().lend(
                        group, partial(self._weights_over, self.controller.weights_lent, group)
                    )
                case FetchWeights(group):
                    self._lent().fetch(
                        group, partial(self._weights_over, self.controller.weights_back, group)
                    )
                case DispatchPrefix() | PullAhead() | DropPart():
                    raise NotImplementedError(
                        f"{command}: a simulated controller splits no requests"
                    )
                case Fail():
                    raise NotImplementedError(f"{command}: a simulated engine is never lost")
                case _:
                    assert_never(command)

    def _lent(self) -> WeightOrders:
        """The orders of weights, which the controller gives where the settings say that weights can
        be lent.
        """
        assert self._weights is not None
        return self._weights

    def _weights_over(self, tell: Callable[[Group, float], list[Command]], group: Group) -> None:
        """All engines of a group have lent their weights, or have them back."""
        self._carry_out(tell(group, self.clock.now_s))

    def _deliver(self, request: SimRequest, group: Group) -> None:
        """A request has come to a group, unless it was dispatched elsewhere meanwhile."""
        if request.group is None and self.controller.state.group_of(request.request_id) == group:
            self.cluster.add(group, request)
