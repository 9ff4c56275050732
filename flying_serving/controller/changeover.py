"""The switch under way: at most one, from its decision until all engines have answered.

    IDLE --begin--> WAITING --advance--> ORDERED --regrouped--> REGROUPED --acknowledged--> IDLE

A switch may fail in any phase, and may be dropped in WAITING. Then the phase is IDLE again.

| phase     | entered in                          | when                                       |
|-----------|-------------------------------------|--------------------------------------------|
| WAITING   | `Changeover.begin`                  | the policy decides, or an operator asks    |
| ORDERED   | `Changeover._order` from `.advance` | it waits for nothing, and engines are told |
| REGROUPED | `Changeover.regrouped`              | the engines whose groups change answer     |
| IDLE      | `Changeover.acknowledged`           | all engines have answered                  |
| IDLE      | `Changeover.fail`                   | an engine is lost, or does not answer      |
| IDLE      | `Changeover.drop`                   | it is not made                             |
"""

from collections.abc import Collection, Mapping

from flying_serving.controller.bookings import Bookings
from flying_serving.controller.commands import Command, Order, Weave
from flying_serving.controller.requests import RequestState
from flying_serving.controller.snapshots import snapshot
from flying_serving.controller.splitter import Splitter
from flying_serving.controller.state import ClusterState
from flying_serving.controller.switches import OpenSwitch, Switch
from flying_serving.layout.groups import Group, Layout
from flying_serving.phase import Phase
from flying_serving.policy.snapshot import Decision
from flying_serving.policy.switching import at_once
from flying_serving.wire import SwitchAnswer

PATIENCE = 1.5
"""Factor of the predicted wait of a switch for old requests, after which its mode changes."""


class SwitchPhase(Phase):
    """The phases of the switch under way.

    IDLE: no switch is under way.
    WAITING: no engine knows of it. *Sequential* and *soft* wait until old requests have ended.
    Every mode waits until engines have the weights that the new groups need.
    ORDERED: every engine is told.
    REGROUPED: the engines whose groups change have answered.
    """

    IDLE = "idle"
    WAITING = "waiting"
    ORDERED = "ordered"
    REGROUPED = "regrouped"


TRANSITIONS: Mapping[SwitchPhase, tuple[SwitchPhase, ...]] = {
    SwitchPhase.IDLE: (SwitchPhase.WAITING,),
    SwitchPhase.WAITING: (SwitchPhase.ORDERED, SwitchPhase.IDLE),
    SwitchPhase.ORDERED: (SwitchPhase.REGROUPED, SwitchPhase.IDLE),
    SwitchPhase.REGROUPED: (SwitchPhase.IDLE,),
}
"""The phases that may follow a phase."""
HOLDING_BACK = ((SwitchPhase.WAITING, "sequential"), (SwitchPhase.ORDERED, "migrate"))
"""The phases in which switches of these modes hold back new requests.

By *migrate* these wait until engines whose groups change have answered. These answer after the step
under way, so its tokens migrate too. The other engines are not waited for: their step may be long.
"""


def _is_overdue(change: OpenSwitch, now_s: float) -> bool:
    """Return whether a switch has waited for old requests for much longer than its policy expected.

    A switch that an operator ordered is never overdue.
    """
    decision = change.switch.decision
    if decision is None or not change.waits_for_requests:
        return False
    return now_s - change.switch.decided_s > PATIENCE * decision.drain_s


class Changeover:
    """Takes the switch under way from phase to phase."""

    def __init__(self, state: ClusterState, bookings: Bookings, splitter: Splitter) -> None:
        self._state = state
        self._bookings = bookings
        self._splitter = splitter
        self.phase = SwitchPhase.IDLE
        self._change: OpenSwitch | None = None
        self._pauses_older = False  # True if engines do, as a hard switch was the last

    def _enter(self, phase: SwitchPhase) -> None:
        """Enter the next phase. Raises RuntimeError if it may not follow the present one."""
        self.phase = self.phase.then(phase, TRANSITIONS, "a switch")

    # ---- questions of other parts

    @property
    def is_under_way(self) -> bool:
        """True if there is a switch."""
        return self.phase is not SwitchPhase.IDLE

    @property
    def holds_back_requests(self) -> bool:
        """True if the switch keeps new requests waiting."""
        change = self._change
        return change is not None and (self.phase, change.switch.mode) in HOLDING_BACK

    @property
    def untold_switch(self) -> Switch | None:
        """The switch, as long as no engine knows of it."""
        if self._change is None or self.phase is not SwitchPhase.WAITING:
            return None
        return self._change.switch

    def is_current(self, switch: Switch) -> bool:
        """Return whether this switch is under way.

        It is not once it has failed, even if engines answer later.
        """
        return self._change is not None and self._change.switch is switch

    # ---- from phase to phase

    def begin(
        self,
        layout: Layout,
        mode: str,
        weave_steps: int | None,
        now_s: float,
        decision: Decision | None,
    ) -> tuple[Switch, list[Command]]:
        """Begin a switch, and undo splits.

        A switch of an operator, without a decision, undoes all splits, others those of groups that
        end.
        """
        self._enter(SwitchPhase.WAITING)
        state = self._state
        switch = Switch(state.layout, layout, mode, now_s, state.running, decision)
        steps = state.settings.weave_steps if weave_steps is None else weave_steps
        self._change = OpenSwitch(switch, state.outside(layout), steps, mode)
        state.switches.begin(self._change)
        state.begin_span(layout, now_s, switch if switch.is_for_load else None)

        undone = list(state.splits.open) if decision is None else state.splits.without(layout)
        return switch, [command for name in undone for command in self._splitter.undo(name)]

    def advance(self, now_s: float) -> list[Command]:
        """Tell engines of the switch, if it waits for nothing more.

        Weights come back meanwhile that it, or a request, waits for. Engines pause no older lanes
        while a switch waits for requests in them.
        """
        state, change = self._state, self._change
        if change is None:
            return [*state.weight_lending.fetch((), now_s)]
        if self.phase is SwitchPhase.WAITING and _is_overdue(change, now_s):
            shot = snapshot(state, state.lane_figures(), now_s)
            change.switch.mode = at_once(shot, change.switch.new, state.settings.objective)

        groups = change.switch.new.groups
        leaving = state.weight_lending.phases.keys() - set(groups)
        fetches = state.weight_lending.fetch(leaving, now_s)
        if self.phase is not SwitchPhase.WAITING:
            return [*fetches]
        if change.waits_for_requests or not all(map(state.rooms.is_ready, groups)):
            return [*fetches, *self._end_pause()]
        return [*fetches, *self._order(change, now_s)]

    def _order(self, change: OpenSwitch, now_s: float) -> list[Command]:
        self._enter(SwitchPhase.ORDERED)
        state, switch = self._state, change.switch
        if change.begun_mode != "soft":
            # requests that began while it waited for weights
            change.draining |= state.outside(switch.new)
        switch.ordered_s = now_s
        state.layout, state.to_restore = switch.new, None
        self._pauses_older = switch.mode == "hard"

        order = Order(switch, change.weave_steps)
        if self.holds_back_requests:
            return [order]
        return [order, *self._bookings.recall(change.draining, now_s, also_begun=False)]

    def _end_pause(self) -> list[Command]:
        """Resume requests that a hard switch has paused, as this switch waits for their end."""
        if not self._pauses_older:
            return []
        self._pauses_older = False
        return [Weave(frozenset(self._state.layout.engines))]

    def regrouped(self, now_s: float) -> list[Command]:
        """Let requests that migrate leave: the engines whose groups change have answered."""
        change, held_back = self._change, self.holds_back_requests
        assert change is not None
        self._enter(SwitchPhase.REGROUPED)
        commands: list[Command] = []
        if held_back:
            commands += self._bookings.recall(change.draining, now_s, also_begun=True)
        if change.begun_mode == "soft":
            commands += self._widen(change.draining, now_s)
        return commands

    def _widen(self, draining: Collection[str], now_s: float) -> list[Command]:
        """Migrate requests that idle engines began during a soft switch to their new groups."""
        recalls, widened = list[Command](), list[tuple[RequestState, Group]]()
        for request in list(self._state.started.values()):
            assert request.group is not None
            group = self._state.layout.group_of(request.group[0])
            begun_alone = len(request.group) == 1 and request.request_id not in draining
            may_migrate = request.spec.can_migrate and not request.stays
            fits = len(group) in request.sizes and group != request.group
            if begun_alone and may_migrate and fits:
                kv = self._bookings.offer_kv(request)
                recalls.append(self._bookings.suspend(request, now_s, kv))
                widened.append((request, group))
        lanes = self._state.lane_figures()
        return recalls + [self._bookings.start(request, group, lanes) for request, group in widened]

    def acknowledged(self, answers: list[SwitchAnswer], now_s: float) -> None:
        """End the switch: every engine has answered."""
        change = self._change
        assert change is not None
        change.acknowledged(answers, now_s)
        self._end()

    # ---- switches that are not made

    def fail(self, problem: str, now_s: float) -> None:
        """End the switch, if there is one: some engine cannot answer."""
        if self._change is not None:
            self._change.failed(problem, now_s)
            self._state.hindsight.forget()
            self._end()

    def drop(self, reason: str, now_s: float) -> None:
        """End a switch that no engine knows of."""
        assert self.untold_switch is not None
        self.untold_switch.was_dropped = True
        self.fail(reason, now_s)

    def take_in(self, engine: int) -> None:
        """Add an engine that is back, alone, to the layout of a switch that no engine knows of."""
        if self.untold_switch is not None:
            self.untold_switch.new = self.untold_switch.new.beside(engine)

    def _end(self) -> None:
        self._enter(SwitchPhase.IDLE)
        self._change = None
        self._state.switches.prune()
