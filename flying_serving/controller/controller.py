"""The controller: events in, commands out, time as an argument.

It owns every decision; engines own safety. The API server's `Shell` and the simulator are shells
around this class. They call it for each event and carry out the commands that it returns, in order.
The package's docstring lists the parts of the controller.
"""

from collections.abc import Callable, Iterable, Sequence

from flying_serving.controller.admission import Admission
from flying_serving.controller.bookings import Bookings
from flying_serving.controller.changeover import Changeover
from flying_serving.controller.commands import Command, Fail, FetchWeights, RevokeOffer
from flying_serving.controller.decider import Decider
from flying_serving.controller.dispatcher import Dispatcher
from flying_serving.controller.fault_recovery import FaultRecovery
from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.requests import ALONE, Origin, RequestSpec, RequestState
from flying_serving.controller.reserving_choice import ReservingChoice
from flying_serving.controller.settings import Settings
from flying_serving.controller.splitter import Splitter
from flying_serving.controller.state import ClusterState
from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.snapshot import Decision
from flying_serving.predict.steps import Step
from flying_serving.wire import SwitchAnswer

MakeChoice = Callable[[ClusterState], GroupChoice]


class Controller:
    """Decides where the requests of one server run, and which groups its engines form.

    `make_choice`: makes the part that chooses groups; None: the one of its policy.
    """

    def __init__(self, settings: Settings, make_choice: MakeChoice | None = None) -> None:
        state = self.state = ClusterState(settings)
        self.settings = settings
        self.admission = Admission(settings, state.pool, state.loads, lambda: state.layout.groups)
        own = ReservingChoice if settings.policy.joins_for_long else GroupChoice
        choice = self.choice = (make_choice or own)(state)
        bookings = self.bookings = Bookings(state, choice)
        splitter = self._splitter = Splitter(state, choice, bookings)
        self._dispatcher = Dispatcher(state, choice, bookings, splitter, self.admission.pace)
        self.changeover = Changeover(state, bookings, splitter)
        self.recovery = FaultRecovery(state, choice, bookings, splitter, self.changeover)
        self.decider = Decider(state)
        self._arrivals = 0

    # ---- requests

    def arrived(
        self, request_id: str, spec: RequestSpec, now_s: float, origin: Origin = ALONE
    ) -> list[Command]:
        """Take in a request that has arrived. Raises RequestError or PoolFull if it is refused."""
        sizes = self.settings.capacity.sizes(spec)
        self.admission.enter(origin, urgent=spec.urgent)
        self._arrivals += 1
        request = RequestState(request_id, spec, sizes, self._arrivals, now_s)
        self._dispatcher.take_in(request, now_s)
        self.state.hindsight.arrived()
        self.state.demand.arrived(spec.prompt_tokens, spec.max_output_tokens, now_s, origin.event)
        # an arrival ends nothing that a switch or weights wait for
        commands = self._dispatch_waiting(now_s)
        return commands + self._change(now_s, decides=self.decider.is_worth_asking(request))

    def got_tokens(self, request_id: str, count: int, now_s: float) -> None:
        """Count tokens that a running request got."""
        self.state.deadlines.drop(request_id)
        request = self.state.started.get(request_id)
        if request is not None:
            before = request.output_tokens
            self.state.loads.add_tokens(request, count)
            self.state.demand.grew(before, request.output_tokens)
            self.state.switches.got_token(request_id, now_s)

    def finished(
        self, request_ids: Iterable[str], now_s: float, *, aborted: bool = False
    ) -> list[Command]:
        """End requests that are over, in the pool or in a group."""
        commands: list[Command] = []
        for request_id in request_ids:
            commands += self._dispatcher.end(request_id, now_s, aborted=aborted)
        return commands + self._settle(now_s)

    def requests_failed(self, failures: Sequence[Fail], now_s: float) -> list[Command]:
        """End requests that an engine has ended with an error, and say so."""
        if not failures:
            return []
        ended = [failure.request_id for failure in failures]
        return [*failures, *self.finished(ended, now_s, aborted=True)]

    def group_full(self, request_id: str, now_s: float) -> list[Command] | None:
        """Find another group for a request that has filled its group; see
        `Dispatcher.group_full`.
        """
        request = self.state.started.get(request_id)
        if request is None:  # another full group has led to its recall
            return []
        commands = self._dispatcher.group_full(request, now_s)
        if commands is None:
            return None
        return commands + self._settle(now_s, decides=request_id in self.state.pool)

    def ends_at_full_group(self, request_id: str) -> list[Command]:
        """Revoke the offer of a request that ends in its group, as `group_full` found no other."""
        request = self.state.started[request_id]
        assert request.group is not None
        return [] if request.offer is None else [RevokeOffer(request_id, request.group)]

    # ---- parts of split requests

    def prefix_ended(self, request_id: str, now_s: float, *, failed: bool) -> list[Command]:
        """End the prefix of a split request: it is over, or its group `failed` it."""
        if not self.state.splits.in_prompt(request_id):
            return []
        return self._splitter.prefix_ended(request_id, failed=failed) + self._settle(now_s)

    def part_failed(self, request_id: str) -> list[Command]:
        """Let a split request go on as an ordinary one: its part cannot be sent."""
        return self._splitter.undo(request_id)

    # ---- measurements and time

    def stepped(self, steps: Iterable[Step]) -> None:
        """Learn the costs of measured steps."""
        for step in steps:
            self.state.steps.observe(step)

    def tick(self, now_s: float) -> list[Command]:
        """Act on the time that has passed: fail overdue suspects, reject expired requests, plan
        splits again, ask the policy.
        """
        commands = self.recovery.fail_overdue_suspects(now_s)
        waits = len(self.state.pool) > 0 and not self.changeover.holds_back_requests
        self.admission.pace.tick(now_s, waits=waits)
        commands += self._dispatcher.reject_expired(now_s)
        if not self.changeover.is_under_way:
            commands += self._splitter.replan(now_s)
        commands += self._settle(now_s, decides=True)
        self.state.look_back(now_s)
        return commands

    # ---- switches

    def begin_switch(
        self,
        layout: Layout,
        mode: str,
        weave_steps: int | None,
        now_s: float,
        decision: Decision | None = None,
    ) -> tuple[Switch, list[Command]]:
        """Begin to change the layout; only one change may be under way."""
        switch, commands = self.changeover.begin(layout, mode, weave_steps, now_s, decision)
        return switch, commands + self._settle(now_s)

    def regrouped(self, now_s: float) -> list[Command]:
        """Let requests that migrate leave: the engines whose groups change have answered."""
        return self.changeover.regrouped(now_s) + self._settle(now_s)

    def acknowledged(self, answers: list[SwitchAnswer], now_s: float) -> list[Command]:
        """End the switch: every engine has answered the order; `regrouped` came before."""
        self.changeover.acknowledged(answers, now_s)
        return self._settle(now_s)

    def failed(self, switch: Switch, problem: str, now_s: float) -> None:
        """End a switch whose order some engine did not answer."""
        if self.changeover.is_current(switch):
            self.changeover.fail(problem, now_s)

    def drop(self, reason: str, now_s: float) -> list[Command]:
        """Do not make the switch that no engine knows of; requests that it held back go on."""
        self.changeover.drop(reason, now_s)
        return self._settle(now_s)

    # ---- weights that are lent

    def weights_lent(self, group: Group, now_s: float, *, complete: bool = True) -> list[Command]:
        """Note that a group's engines have lent their weights. If not all could, all get them
        back.
        """
        self.state.weight_lending.lent(group, now_s, complete=complete)
        commands: list[Command] = [] if complete else [FetchWeights(group)]
        return commands + self._settle(now_s)

    def weights_back(self, group: Group, now_s: float) -> list[Command]:
        """Note that the engines of a group have all their weights again."""
        self.state.weight_lending.back(group, now_s)
        return self._settle(now_s)

    # ---- engines

    def engines_lost(
        self, engines: Iterable[int], now_s: float, *, killed: bool = False
    ) -> list[Command]:
        """Take lost engines out of the layout, and requests from them; see
        `FaultRecovery.engines_lost`.
        """
        commands = self.recovery.engines_lost(list(engines), now_s, killed=killed)
        return commands + self._settle(now_s, decides=True)

    def engine_back(self, engine: int, now_s: float) -> list[Command]:
        """Take back an engine that works again, alone; the others know it."""
        self.recovery.engine_back(engine, now_s)
        return self._settle(now_s, decides=True)

    # ---- the consequences of an event

    def _settle(self, now_s: float, *, decides: bool = False) -> list[Command]:
        """Advance until nothing is left to do, in the order of the package's docstring.

        `_change` may begin a switch, which settles again; a switch is under way by then, so no
        other begins.
        """
        commands = self.changeover.advance(now_s)
        commands += self._dispatch_waiting(now_s)
        return commands + self._change(now_s, decides=decides)

    def _dispatch_waiting(self, now_s: float) -> list[Command]:
        """Give groups to requests that wait, and lend weights to one that needs them."""
        state, changeover = self.state, self.changeover
        if changeover.holds_back_requests:
            return []
        if changeover.is_under_way:
            return self._dispatcher.dispatch_waiting(now_s, splits=False)
        commands = self._dispatcher.dispatch_waiting(now_s, splits=True)
        return [*commands, *state.weight_lending.lend(state.layout, now_s)]

    def _change(self, now_s: float, *, decides: bool) -> list[Command]:
        """Make a lost layout again, or with `decides` the policy's choice; one at a time."""
        if self.changeover.is_under_way:
            return []
        layout = self.recovery.take_restored()
        if layout is not None:
            return self.begin_switch(layout, "migrate", None, now_s)[1]
        if not decides:
            return []

        decision, migrates_left_behind = self.decider.decide(now_s)
        if decision is not None:
            return self.begin_switch(decision.layout, decision.mode, None, now_s, decision)[1]
        if migrates_left_behind:
            left_behind = self.state.outside(self.state.layout)
            return self.bookings.recall(left_behind, now_s, also_begun=True) + self._settle(now_s)
        return []
