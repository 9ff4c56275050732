"""The controller: events in, commands out, time as an argument. It owns every decision; engines own safety.

The live server's client and the simulator are shells around this class: they call it for each event and carry out the
commands that it returns, in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from flying_serving.controller.commands import Command, Dispatch, Order, Recall, Reject
from flying_serving.controller.moving import to_move
from flying_serving.controller.outlook import Outlook
from flying_serving.controller.placing import Placing, Round
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.settings import Settings
from flying_serving.controller.switches import Changeover, Switch
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.snapshot import Decision
from flying_serving.policy.switching import at_once
from flying_serving.predict.steps import Step
from flying_serving.predict.work import LaneFigures


class Controller(Outlook):
    """Task pool, groups and layout of one server."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.placing = Placing(settings.capacity, settings.limits, settings.engines)
        self.would_do: deque[Decision] = deque(maxlen=100)
        self._changeover: Changeover | None = None
        self._arrivals = 0

    # ---- requests

    def check(self, wanted: RequestSpec) -> tuple[int, ...]:
        """Group sizes that can run a request.

        Raises:
            RequestError: if no layout can ever run it.
            PoolFull: if too many wait.
        """
        sizes = self.placing.check(wanted.tokens, wanted.degree)
        self.pool.check()
        return sizes

    def arrived(self, request_id: str, wanted: RequestSpec, now_s: float) -> list[Command]:
        """A request has come. Raises as `check`."""
        sizes = self.check(wanted)
        self._arrivals += 1
        self.pool.add(RequestState(request_id, wanted, sizes, self._arrivals, now_s))
        self.demand.arrived(wanted.prompt_tokens, wanted.max_output_tokens, now_s)
        commands = self._dispatch(now_s)
        # the next tick is soon enough where one more says little, or while only these groups hold one that runs: then
        # layouts are dear to judge
        told = request_id in self.pool and self.pool.few and not self.loads.any_wide(self.layout.groups)
        if wanted.urgent or told:
            commands += self._decide(now_s)
        return commands

    def tokens(self, request_id: str, count: int, now_s: float) -> None:
        """A running request got tokens."""
        tracked = self._running.get(request_id)
        if tracked is not None:
            self.loads.token(tracked, count)
            self.switches.token(request_id, now_s)

    def finished(self, request_ids: Iterable[str], now_s: float, *, aborted: bool = False) -> list[Command]:
        """Requests are over, wherever they were."""
        for request_id in request_ids:
            self.pool.remove(request_id)
            self.switches.ended(request_id, now_s)  # one that waits may have streamed before
            tracked = self._running.pop(request_id, None)
            if tracked is None:
                continue
            if not aborted:
                self.demand.finished(tracked.output_tokens)
            self.loads.remove(tracked)
        return self._go_on(now_s)

    def outgrew(self, request_id: str, now_s: float) -> list[Command] | None:
        """A request has as many tokens as its group holds: it waits for a wider one, where it is prefilled again.

        Returns None if there is no wider one for it, and none will be formed: it ends there, as in vLLM.
        """
        tracked = self._running[request_id]
        sizes = set(tracked.fitting(self.settings.capacity.tokens))
        if not self.settings.forms_groups:
            sizes &= {len(group) for group in self.layout.groups}
        stays = tracked.wanted.degree is not None or not tracked.wanted.movable
        if not sizes or stays or self.settings.loses_groups:
            return None
        self._suspend(tracked, now_s, None)  # its group has ended it
        self.pool.add(tracked)
        return self._dispatch(now_s) + self._decide(now_s)

    def group_of(self, request_id: str) -> Group | None:
        """Where a request runs."""
        tracked = self._running.get(request_id)
        return tracked.group if tracked else None

    # ---- measurements and time

    def stepped(self, steps: Iterable[Step]) -> None:
        """Steps were measured."""
        for step in steps:
            self.steps.observe(step)

    def tick(self, now_s: float) -> list[Command]:
        """Some time has passed."""
        expired = [self.pool.remove(request_id) for request_id in self.pool.expired(now_s)]
        late: list[Command] = [Reject(one.request_id, now_s - one.arrived_s) for one in expired if one is not None]
        return late + self._go_on(now_s) + self._decide(now_s)

    # ---- switches

    def order(
        self, layout: Layout, mode: str, weave_steps: int | None, now_s: float, decision: Decision | None = None
    ) -> tuple[Switch, list[Command]]:
        """Begin to change the layout; only one change may be under way (`changing`)."""
        assert self._changeover is None
        old = self._outside(layout)
        switch = self.switches.begin(self.layout, layout, mode, len(self._running), old, now_s, decision)
        steps = self.settings.weave_steps if weave_steps is None else weave_steps
        self._changeover = Changeover(switch, steps)
        return switch, self._go_on(now_s)

    @property
    def changing(self) -> bool:
        """Whether a switch is under way: it waits for old requests or for the engines' answers."""
        return self._changeover is not None

    def acknowledged(self, reports: list[dict[str, float]], now_s: float) -> list[Command]:
        """Every engine has answered the order."""
        assert self._changeover is not None
        switch = self._changeover.switch
        switch.acknowledged(reports, now_s)
        moved = self._take_back(switch.draining, now_s, streams=True) if self._changeover.holds else []
        self._changeover = None
        self.switches.prune()
        return moved + self._move_soft(now_s) + self._dispatch(now_s)

    def failed(self, problem: str, now_s: float) -> None:
        """Some engine did not answer the order."""
        assert self._changeover is not None
        self._changeover.switch.failed(problem, now_s)
        self._end_change()

    @property
    def waits_for_idle(self) -> Switch | None:
        """The switch under way, as long as no engine knows of it: it waits for old requests to end."""
        change = self._changeover
        return change.switch if change is not None and not change.is_ordered else None

    def drop(self, reason: str, now_s: float) -> list[Command]:
        """Do not make the switch that `waits_for_idle`; requests that it held back go on."""
        assert self.waits_for_idle is not None
        self.waits_for_idle.dropped(reason, now_s)
        self._end_change()
        return self._dispatch(now_s)

    def _end_change(self) -> None:
        self._changeover = None
        for tracked in self._running.values():
            tracked.soft = False
        self.switches.prune()

    # ---- inside

    def _go_on(self, now_s: float) -> list[Command]:
        """What may happen now that something has ended: a switch that waited for it, then requests that waited."""
        change = self._changeover
        if change is not None and change.late(now_s):
            change.switch.mode = self._at_once(change.switch, now_s)
        if change is not None and change.ready:
            change.ordered(now_s)
            self.layout = change.switch.new
            order: list[Command] = [Order(change.switch, change.weave_steps)]
            if change.holds:
                return order
            return order + self._take_back(change.switch.draining, now_s, streams=False) + self._dispatch(now_s)
        return self._dispatch(now_s)

    def _outside(self, layout: Layout) -> set[str]:
        return {r.request_id for r in self._running.values() if r.group not in layout.groups}

    def _take_back(self, old: Collection[str], now_s: float, *, streams: bool) -> list[Command]:
        commands: list[Command] = []
        running = [tracked for tracked in self._running.values() if tracked.request_id in old]
        for tracked, kept_in in to_move(running, self.layout, self.settings, streams=streams):
            assert tracked.group is not None
            commands.append(Recall(tracked.request_id, tracked.group))
            self._suspend(tracked, now_s, kept_in)
            self.pool.add(tracked)
        return commands

    def _at_once(self, switch: Switch, now_s: float) -> str:
        """The best way, by now, to make a switch without waiting for its old requests."""
        return at_once(self.snapshot(self.lanes(), now_s), switch.new, self.settings.weights)

    def _dispatch(self, now_s: float) -> list[Command]:
        if not len(self.pool) or (self._changeover is not None and self._changeover.holds):
            return []
        commands: list[Command] = []
        lanes = self.lanes()
        places = Round(self.placing, self.layout, self.loads, lanes, now_s)

        def place(tracked: RequestState) -> bool:
            expected = self._expected(tracked)
            group = places.place(tracked, expected)
            if group is None:
                return False
            commands.append(self._start(tracked, group, expected, lanes))
            return True

        self.pool.take(place, now_s)
        return commands

    def _start(
        self, tracked: RequestState, group: Group, expected_tokens: float, lanes: Mapping[int, LaneFigures]
    ) -> Dispatch:
        change = self._changeover
        soft = change is not None and change.switch.mode == "soft" and len(group) == 1
        tracked.soft = soft and tracked.wanted.movable
        moved_from = tracked.kept_in if self.placing.move(tracked, group, lanes) is not None else None
        tracked.kept_in = group if moved_from is not None else None
        self.loads.add(tracked, group, expected_tokens, kept=moved_from is not None)
        self._running[tracked.request_id] = tracked
        limit = self.settings.capacity.tokens[len(group)] - tracked.wanted.prompt_tokens
        return Dispatch(tracked.request_id, group, tracked.output_tokens, limit, moved_from)

    def _suspend(self, tracked: RequestState, now_s: float, kept_in: Group | None) -> None:
        del self._running[tracked.request_id]
        tracked.kept_in = kept_in
        tracked.sizes = tracked.fitting(self.settings.capacity.tokens)
        self.loads.remove(tracked)
        self.switches.moved(tracked.request_id, now_s)

    def _move_soft(self, now_s: float) -> list[Command]:
        """The group is free: requests that an idle member has begun meanwhile go there with the tokens they have."""
        commands: list[Command] = []
        lanes = self.lanes()
        for tracked in [r for r in self._running.values() if r.soft]:
            tracked.soft = False
            assert tracked.group is not None
            target = self.layout.group_of(tracked.group[0])
            if target == tracked.group or len(target) not in tracked.sizes:
                continue
            commands.append(Recall(tracked.request_id, tracked.group))
            self._suspend(tracked, now_s, tracked.group)
            commands.append(self._start(tracked, target, self._expected(tracked), lanes))
        return commands

    def _expected(self, tracked: RequestState) -> float:
        outputs = min(max(self.demand.output_tokens, tracked.output_tokens + 1.0), tracked.wanted.max_output_tokens)
        return tracked.wanted.prompt_tokens + outputs

    def _decide(self, now_s: float) -> list[Command]:
        if self._changeover is not None or self.settings.policy.pinned_size is not None:
            return []
        lanes = self.lanes()
        if len(lanes) < len(self.settings.capacity.tokens):
            return []
        policy, shot = self.settings.policy, self.snapshot(lanes, now_s)
        decision = policy.decide(shot, self.settings.weights)
        if self.settings.dry_run:
            if decision is not None and (not self.would_do or self.would_do[-1].layout != decision.layout):
                self.would_do.append(decision)
            return []
        if decision is not None:
            return self.order(decision.layout, decision.mode, None, now_s, decision)[1]
        if policy.catches_up(shot, self.settings.weights):
            return self._take_back(self._outside(self.layout), now_s, streams=True) + self._dispatch(now_s)
        return []
