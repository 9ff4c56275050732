"""One node in the simulator: the production controller, and a shell around it that carries its commands to engines."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flying_serving.controller.commands import Command, Dispatch, Order, Recall, Reject
from flying_serving.controller.controller import Controller
from flying_serving.controller.placing import Placing
from flying_serving.controller.requests import RequestSpec
from flying_serving.controller.settings import Settings
from flying_serving.controller.switches import Switch
from flying_serving.errors import PoolFull, RequestError
from flying_serving.layout.groups import Group, Layout
from flying_serving.predict.steps import Step
from flying_serving.sim.cluster import Clock, Cluster, ClusterShape, StepTime
from flying_serving.sim.engines import SimOrder
from flying_serving.sim.lanes import SimLane
from flying_serving.sim.moves import KVTransfers
from flying_serving.sim.requests import SimRequest, SimStep
from flying_serving.workload.model import Request

TICK_S = 0.1
"""As the live server's clock."""
REST_S = 20.0
"""A live clock never stops; this one does when it has been idle for so long that nothing changes any more."""
STUCK_S = 60.0
"""If so long nothing runs and nothing changes, those that still wait will never run under this policy."""


@dataclass
class Outcome:
    """What became of the requests of a node: those that ended, and those that were refused, with the reason.

    `layouts` has (time, layout) of each change, `output_tokens` how many tokens came in each whole second.
    """

    ended: list[SimRequest] = field(default_factory=list)
    refused: list[tuple[SimRequest, str]] = field(default_factory=list)
    layouts: list[tuple[float, Layout]] = field(default_factory=list)
    switches: list[Switch] = field(default_factory=list)
    output_tokens: Counter[int] = field(default_factory=Counter)


class SimNode:
    """A server with its engines on a virtual clock.

    Args:
        settings: of its controller.
        shape: of its engines.
        step_time: how long their steps take.
        clock: shared with other nodes.
        calibration: steps that a live server would have measured at its start.
        on_end: called with each request that has ended or was refused, instead of keeping it in `outcome`.
        placing: how the controller chooses groups, if not in its own way.
    """

    def __init__(
        self,
        settings: Settings,
        shape: ClusterShape,
        step_time: StepTime,
        clock: Clock,
        calibration: Iterable[Step] = (),
        on_end: Callable[[SimRequest], None] | None = None,
        placing: Placing | None = None,
    ) -> None:
        self.controller = Controller(settings)
        self.controller.steps.calibrate(calibration)
        self.controller.moves = dict(shape.moves)
        if placing is not None:
            self.controller.placing = placing
        self.clock = clock
        self.shape = shape
        self.cluster = Cluster(shape, step_time, clock, self._on_tokens, self._on_step)
        self._moves = KVTransfers(self.cluster, self._deliver)
        for engine in self.cluster.engines:
            engine.arbiter.present = len(self.controller.layout.group_of(engine.engine))
        self.outcome = Outcome(layouts=[(clock.now_s, self.controller.layout)])
        self.open: dict[str, SimRequest] = {}
        self._on_end = on_end
        self._learns = settings.policy.pinned_size is None
        self._measured: list[Step] = []
        self._seen_steps = 0
        self._ticking = False
        self._rested_ticks = 0

    def arrive(self, request: Request) -> None:
        """A client sends a request now; the controller hears of it when the server's front end is done with it."""
        mine = SimRequest(str(request.index), request.prompt_tokens, request.output_tokens, self.clock.now_s)
        if self.shape.keep_times:
            mine.token_s = array("d")
        wanted = RequestSpec(
            request.prompt_tokens,
            request.prompt_tokens + request.output_tokens,
            request.output_tokens,
            request.tp_degree,
            request.priority,
            request.deadline_s,
        )
        self.open[mine.request_id] = mine
        self.clock.after(max(0.0, self.shape.frontend_s - self.shape.message_s), self._admit, mine, wanted)

    def start(self) -> None:
        """The server is up: its clock begins to tick."""
        self._rested_ticks = 0
        if not self._ticking:
            self._ticking = True
            self.clock.after(TICK_S, self._tick)

    def order(self, layout: Layout, mode: str) -> None:
        """An operator orders a switch; only one may be under way."""
        self._carry_out(self.controller.order(layout, mode, None, self.clock.now_s)[1])

    def _admit(self, request: SimRequest, wanted: RequestSpec) -> None:
        try:
            commands = self.controller.arrived(request.request_id, wanted, self.clock.now_s)
        except (RequestError, PoolFull) as error:
            self._refuse(request.request_id, str(error))
            return
        self._carry_out(commands)
        self.start()

    def _tick(self) -> None:
        """As the live server's clock: measurements, then the controller."""
        if self._learns:
            self.controller.stepped(self._measured)
            self._measured.clear()
            for request in self.open.values():
                if request.lane is not None and request.first_token_s >= 0:
                    request.lane.sync(request)
                    self._report(request)
        self._carry_out(self.controller.tick(self.clock.now_s))
        busy = self.controller.running > 0 or self.controller.changing
        self._rested_ticks = 0 if busy else self._rested_ticks + 1
        if self.open and self._rested_ticks * TICK_S > STUCK_S:
            self._give_up()
        self._ticking = bool(self.open) or self._rested_ticks * TICK_S < REST_S
        if self._ticking:
            self.clock.after(TICK_S, self._tick)

    def _give_up(self) -> None:
        """A live server would let them wait until their clients go away."""
        waiting = [tracked.request_id for tracked in self.controller.pool]
        for request_id in waiting:
            self._refuse(request_id, f"no layout for it in {STUCK_S:.0f} s: the policy never makes one")
        self.controller.finished(waiting, self.clock.now_s, aborted=True)

    def _report(self, request: SimRequest) -> None:
        count = request.tokens - request.reported_tokens
        if count:
            self.controller.tokens(request.request_id, count, self.clock.now_s)
            request.reported_tokens = request.tokens

    def _on_step(self, lane: SimLane, duration_s: float, plan: SimStep) -> None:
        """Keep as many steps as one engine makes: learning from a step costs more time than simulating it."""
        self._seen_steps += 1
        if self._learns and self._seen_steps % self.shape.engines == 0:
            context, pairs = plan.context_tokens, plan.prefill_pairs
            self._measured.append(Step(lane.size, duration_s, plan.prefill_tokens, plan.sequences, context, pairs))

    def _on_tokens(self, first: list[SimRequest], ended: list[SimRequest]) -> None:
        now = self.clock.now_s
        for request in first:
            self._report(request)
        for request in ended:
            self._report(request)
            self._close(request)
        if ended:
            self._carry_out(self.controller.finished([request.request_id for request in ended], now))

    def _close(self, request: SimRequest) -> None:
        del self.open[request.request_id]
        if self._on_end is None:
            self.outcome.ended.append(request)
        else:
            self._on_end(request)

    def _refuse(self, request_id: str, reason: str) -> None:
        request = self.open.pop(request_id)
        if self._on_end is None:
            self.outcome.refused.append((request, reason))
        else:
            self._on_end(request)

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Dispatch(request_id, group, moved_from=source):
                    self._moves.send(self.open[request_id], source, group)
                case Recall(request_id, _):
                    self.cluster.remove(self.open[request_id])
                case Reject(request_id, waited_s):
                    self._refuse(request_id, f"waited {waited_s:.1f} s")
                case Order(switch, weave_steps):
                    self.outcome.layouts.append((self.clock.now_s, switch.new))
                    self.outcome.switches.append(switch)
                    _Change(self, switch).begin(weave_steps)

    def _deliver(self, request: SimRequest, group: Group) -> None:
        """A request has come to a group, unless it was sent elsewhere meanwhile."""
        if request.lane is None and self.controller.group_of(request.request_id) == group:
            self.cluster.add(group, request)

    def acknowledge(self, waits_s: list[float]) -> None:
        """All engines have answered an order, each after so long."""
        reports = [{"in_flight_ms": wait_s * 1e3, "overhead_ms": 0.0, "work_ms": 0.0} for wait_s in waits_s]
        self._carry_out(self.controller.acknowledged(reports, self.clock.now_s))
        self.clock.after(self.shape.message_s, self.cluster.moved)


class _Change:
    """One change of layout on its way to the engines, and their answers."""

    def __init__(self, node: SimNode, switch: Switch) -> None:
        self._node = node
        self._switch = switch
        self._begun_s = node.clock.now_s
        self._waits_s: list[float] = []

    def begin(self, weave_steps: int) -> None:
        """Send the orders."""
        node, switch = self._node, self._switch
        for engine in node.cluster.engines:
            size = len(switch.new.group_of(engine.engine))
            order = SimOrder(size, switch.mode, weave_steps, self._taken)
            node.clock.after(node.shape.message_s, node.cluster.order, engine.engine, order)

    def _taken(self, now_s: float) -> None:
        self._waits_s.append(now_s - self._begun_s)
        if len(self._waits_s) == self._node.shape.engines:
            self._node.clock.after(self._node.shape.message_s, self._node.acknowledge, self._waits_s)
