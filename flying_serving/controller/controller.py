"""The controller: events in, commands out, time as an argument. It owns every decision; engines own safety.

The API server's `Shell` and the simulator are shells around this class: they call it for each event and carry out the
commands that it returns, in order.
"""

from collections import deque
from collections.abc import Iterable

from flying_serving.controller.commands import Command, FetchWeights, Order, Reject
from flying_serving.controller.lender import Lender
from flying_serving.controller.places import ALONE, Origin
from flying_serving.controller.placing import Placing
from flying_serving.controller.requests import KVOffer, RequestSpec, RequestState
from flying_serving.controller.settings import Settings
from flying_serving.controller.switches import Changeover, Switch
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.snapshot import Decision
from flying_serving.policy.switching import at_once
from flying_serving.predict.steps import Step
from flying_serving.wire import SwitchAnswer


class Controller(Lender):
    """The Dispatcher of one server with its decisions and switches; `placing` chooses groups, if not in its own way."""

    def __init__(self, settings: Settings, placing: Placing | None = None) -> None:
        super().__init__(settings, placing)
        self.would_do: deque[Decision] = deque(maxlen=100)
        self.last_decision: Decision | None = None
        self._arrivals = 0

    # ---- requests

    def arrived(self, request_id: str, spec: RequestSpec, now_s: float, origin: Origin = ALONE) -> list[Command]:
        """A request has arrived. Raises RequestError if no layout ever can run it, PoolFull if it may not wait."""
        sizes = self.placing.sizes(spec)
        self.admission.enter(origin, urgent=spec.urgent)
        self._arrivals += 1
        self._take_in(RequestState(request_id, spec, sizes, self._arrivals, now_s), now_s)
        self.demand.arrived(spec.prompt_tokens, spec.max_output_tokens, now_s, origin.event)
        commands = self._dispatch(now_s)
        # one more says little in a long queue; where only these groups hold one that runs, layouts are dear to evaluate
        few = len(self.pool) <= self.settings.limits.max_num_seqs
        tells = request_id in self.pool and few and not any(self.loads[group].wide for group in self.layout.groups)
        if spec.urgent or tells:
            commands += self._decide(now_s)
        return commands

    def tokens(self, request_id: str, count: int, now_s: float) -> None:
        """A running request got tokens."""
        self.deadlines.drop(request_id)
        state = self.started.get(request_id)
        if state is not None:
            self.loads.token(state, count)
            self.switches.token(request_id, now_s)

    def finished(self, request_ids: Iterable[str], now_s: float, *, aborted: bool = False) -> list[Command]:
        """Requests are over, wherever they were."""
        commands: list[Command] = []
        for request_id in request_ids:
            commands += self._unsplit(request_id, undone=False)
            self.deadlines.drop(request_id)
            self.pool.remove(request_id)
            self.switches.ended(request_id, now_s)  # one that waits may have streamed before
            state = self.started.pop(request_id, None)
            if state is None:
                continue
            if not aborted:
                self.demand.finished(state.output_tokens)
            self.loads.remove(state)
        return commands + self._go_on(now_s)

    def prefix_ended(self, request_id: str, now_s: float, *, failed: bool) -> list[Command]:
        """The prefix of a split request is over, so its second group has the whole request; or its group failed it."""
        if not self.splits.in_prompt(request_id):
            return []
        if failed:
            return self._unsplit(request_id, undone=True) + self._go_on(now_s)
        self.splits.end(request_id)
        return self._go_on(now_s)

    def group_full(self, request_id: str, now_s: float) -> list[Command] | None:
        """A request has as many tokens as it may have in its group: it waits for another, which pulls its KV.

        At its split the second group goes on at once. Returns None if it is as long as its group holds and there is no
        wider one for it, and none will be formed: it ends there, as in vLLM.
        """
        state = self.started.get(request_id)
        if state is None:  # what another full group led to has recalled it: it waits already
            return []
        if handed_off := self._hand_off(state, now_s):
            return handed_off
        group, sizes = state.group, set(state.fitting(self.settings.capacity.most_tokens))
        assert group is not None
        is_full = self.lending.holds(group) <= state.context_tokens or not state.spec.can_migrate
        kv = None if state.offer is None else KVOffer(group, state.offer)
        if not self.settings.forms_groups:
            sizes &= self._sizes_ahead()
        if sizes and self.lengths.goes_on(state):
            commands = self._unsplit(request_id, undone=True)
            self._to_pool(state, now_s, kv)
            return commands + self._dispatch(now_s) + self._decide(now_s)
        if is_full:
            return None
        self._suspend(state, now_s, kv)  # its split was undone, or its group holds more by now; no other may do
        return [self._start(state, group, self.lanes())]

    # ---- measurements and time

    def stepped(self, steps: Iterable[Step]) -> None:
        """Steps were measured."""
        for step in steps:
            self.steps.observe(step)

    def tick(self, now_s: float) -> list[Command]:
        """Some time has passed."""
        self.admission.pace.tick(now_s, waits=len(self.pool) > 0 and not self._held)
        expired = self.deadlines.expired(now_s)
        rejects: list[Command] = [Reject(one.request_id, now_s - one.arrived_s, one.group) for one in expired]
        ended = self.finished([one.request_id for one in expired], now_s, aborted=True)
        return rejects + ended + self._decide(now_s)

    # ---- switches

    def order(
        self, layout: Layout, mode: str, weave_steps: int | None, now_s: float, decision: Decision | None = None
    ) -> tuple[Switch, list[Command]]:
        """Begin to change the layout; only one change may be under way (`changing`)."""
        assert self._changeover is None
        old = self._outside(layout)
        switch = self.switches.begin(Switch(self.layout, layout, mode, now_s, self.running, old, decision))
        steps = self.settings.weave_steps if weave_steps is None else weave_steps
        self._changeover = Changeover(switch, steps, is_soft=mode == "soft")
        ends = self.splits.request_ids if decision is None else self.splits.without(layout)
        commands = [command for request_id in ends for command in self._unsplit(request_id, undone=True)]
        return switch, commands + self._go_on(now_s) + self._end_pause()

    def regrouped(self, now_s: float) -> list[Command]:
        """The engines whose groups change have answered the order: what migrates leaves the old groups now."""
        change = self._changeover
        assert change is not None
        old = change.switch.draining
        commands = self._recall(old, now_s, streams=True) if change.holds else []
        change.is_regrouped = True
        if change.is_soft:
            commands += self._widen(old, now_s)
        return commands + self._dispatch(now_s)

    def acknowledged(self, answers: list[SwitchAnswer], now_s: float) -> list[Command]:
        """Every engine has answered the order; `regrouped` came before."""
        change = self._changeover
        assert change is not None
        change.switch.acknowledged(answers, now_s)
        self._end_change()
        return self._dispatch(now_s)

    def drop(self, reason: str, now_s: float) -> list[Command]:
        """Do not make the switch that `waits_for_idle`; requests that it held back go on."""
        assert self.waits_for_idle is not None
        self.waits_for_idle.dropped(reason, now_s)
        self._end_change()
        return self._dispatch(now_s)

    # ---- weights that are lent

    def weights_lent(self, group: Group, now_s: float, *, complete: bool = True) -> list[Command]:
        """The engines of a group have lent their weights; if not all could, those that did have them back."""
        self.lending.end(group, now_s, complete=complete)
        return ([] if complete else [FetchWeights(group)]) + self._go_on(now_s)

    def weights_back(self, group: Group, now_s: float) -> list[Command]:
        """The engines of a group have all their weights again."""
        self.lending.end(group, now_s)
        return self._go_on(now_s)

    # ---- inside

    def _go_on(self, now_s: float) -> list[Command]:
        """What may happen now that something has ended: a switch that waited for it, then requests that waited."""
        change = self._changeover
        if change is not None and change.overdue(now_s):
            change.switch.mode = at_once(self.snapshot(self.lanes(), now_s), change.switch.new, self.settings.objective)
        fetches = self._fetch(now_s)
        if change is None or not change.ready or not self._has_weights(change.switch.new):
            return fetches + self._dispatch(now_s)
        if not change.is_soft:  # what began while it waited for weights
            change.switch.draining |= self._outside(change.switch.new)
        change.ordered(now_s)
        self.layout, self._pauses_older = change.switch.new, change.switch.mode == "hard"
        commands = [*fetches, Order(change.switch, change.weave_steps)]
        if not change.holds:
            commands += self._recall(change.switch.draining, now_s, streams=False)
        return commands + self._dispatch(now_s)

    def _dispatch(self, now_s: float) -> list[Command]:
        if self._held:
            return []
        commands = self._place_waiting(now_s, splits=self._changeover is None)
        return commands if self._changeover is not None else commands + self._lend(now_s)

    def _decide(self, now_s: float) -> list[Command]:
        if self._changeover is not None or self.settings.policy.pinned_size is not None:
            return []
        lanes = self.lanes()
        if len(lanes) < len(self.settings.capacity.tokens):
            return []
        policy, shot = self.settings.policy, self.snapshot(lanes, now_s)
        self.switches.see(shot.needs, now_s)
        last = self.last_decision = policy.decide(shot, self.settings.objective)
        decision = last if last is not None and last.is_made else None
        if self.settings.dry_run:
            if decision is not None and (not self.would_do or self.would_do[-1].layout != decision.layout):
                self.would_do.append(decision)
            return []
        if decision is not None:
            return self.order(decision.layout, decision.mode, None, now_s, decision)[1]
        if policy.migrates_left_behind(shot, self.settings.objective):
            old = self._outside(self.layout)
            return self._recall(old, now_s, streams=True) + self._dispatch(now_s)
        return []
