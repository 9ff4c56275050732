"""Engines that are lost and come back: their requests go on elsewhere, and no layout has them meanwhile."""

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from flying_serving.controller.commands import Command, Fail
from flying_serving.controller.controller import Controller
from flying_serving.controller.lending import needed_tokens
from flying_serving.controller.placing import Placing
from flying_serving.controller.requests import RequestState
from flying_serving.controller.settings import Settings
from flying_serving.controller.suspicion import Suspicion, suspected
from flying_serving.layout.groups import Group, Layout

MOST_WAIT_S = 60.0
"""A suspect that may get the last engine no more fails if no other is back by then."""


@dataclass
class OrphanCounts:
    """Requests whose group has lost an engine: those that wait for another again, and those that failed."""

    requeued: int = 0
    failed: int = 0


class SurvivingController(Controller):
    """A controller that may lose engines. A group that lacks one is no more: its other members are alone then."""

    def __init__(self, settings: Settings, placing: Placing | None = None) -> None:
        super().__init__(settings, placing)
        self.lost = self.placing.lost
        self._step_tokens = settings.limits.max_num_batched_tokens
        self.orphans = OrphanCounts()
        self._cornered_s: dict[str, float] = {}
        """Suspects that wait since a time for engines to come back, as they may not have the last one."""
        self._restored: Layout | None = None
        """What an operator, or a fixed policy, has ordered, and an engine is missing for."""

    def engines_lost(self, engines: Collection[int], now_s: float, *, killed: bool = False) -> list[Command]:
        """Engines are lost, and others are told. What ran in their groups waits again, in its old place, or fails.

        `killed`: it is one engine, whose process was killed from outside.
        """
        self.lost.update(engines)
        commands: list[Command] = []
        self._suspect(engines, killed=killed)
        for request_id, split in list(self.splits.open.items()):
            if not self.lost.isdisjoint((*split.kv.group, *split.second)):
                commands += self._unsplit(request_id, undone=True)
        for state in self.pool:
            self._forget_kv(state)
        for state in list(self.started.values()):
            if state.group is not None and not self.lost.isdisjoint(state.group):
                commands.append(self._orphaned(state, now_s))
        for state in self.started.values():
            self._forget_kv(state)
        if self._changeover is not None:
            self._changeover.switch.failed(f"engines {sorted(engines)} were lost", now_s)
            self._end_change()
        self.switches.void_promises()
        if self._restored is None and (self.settings.dry_run or not self.settings.policy.decides):
            self._restored = self.layout
        self._regroup(self.layout)
        self._note_cornered(now_s)
        return commands + self._dispatch(now_s) + self._decide(now_s)

    def engine_back(self, engine: int, now_s: float) -> list[Command]:
        """An engine that was lost works again, alone, also in a layout that is to come; the others know it."""
        self.lost.discard(engine)
        if self._restored is not None:
            self._restored = self._restored.beside(engine)
        change = self._changeover
        if change is not None and not change.is_ordered:  # once engines are told, `layout` is the new one
            change.switch.new = change.switch.new.beside(engine)
        self._regroup(self.layout.beside(engine))
        for state in self.started.values():
            _trust(state, engine)
        self.pool.revise(lambda state: _trust(state, engine))
        self._note_cornered(now_s)
        return self._dispatch(now_s) + self._restore(now_s) + self._decide(now_s)

    def tick(self, now_s: float) -> list[Command]:
        """Some time has passed."""
        return self._give_up(now_s) + super().tick(now_s) + self._restore(now_s)

    def _give_up(self, now_s: float) -> list[Command]:
        """Fail suspects that wait for engines which do not come back."""
        if not self._cornered_s:
            return []
        overdue = [one for one in self.pool if now_s - self._cornered_s.get(one.request_id, now_s) > MOST_WAIT_S]
        return [self._fail(state, f"{_lost_while(state)}, and others are not back", now_s) for state in overdue]

    def _note_cornered(self, now_s: float) -> None:
        """Engines are lost or back: keep since when each suspect that waits may have none of those that are there."""
        cornered = [state.request_id for state in self.pool if self.placing.is_cornered(state)]
        self._cornered_s = {request_id: self._cornered_s.get(request_id, now_s) for request_id in cornered}

    def _go_on(self, now_s: float) -> list[Command]:
        """As the controller; once engines are told of a layout, what was ordered before is not made again."""
        commands = super()._go_on(now_s)
        if self._changeover is not None and self._changeover.is_ordered:
            self._restored = None
        return commands

    def _sizes_ahead(self) -> set[int]:
        """As the controller; and those of the layout that is made again."""
        restored = () if self._restored is None else self._restored.groups
        return super()._sizes_ahead() | {len(group) for group in restored}

    def _restore(self, now_s: float) -> list[Command]:
        """Once all engines of the layout that was ordered are there, it is made again."""
        layout = self._restored
        if layout is None or self._changeover is not None or not self.lost.isdisjoint(layout.engines):
            return []
        self._restored = None
        return [] if layout == self.layout else self.order(layout, "migrate", None, now_s)[1]

    def _decide(self, now_s: float) -> list[Command]:
        """As the controller; while no engine is there, there is nothing to choose."""
        return super()._decide(now_s) if self.layout.groups else []

    def _orphaned(self, state: RequestState, now_s: float) -> Command:
        """A request has lost its group, and begins anew with the tokens that it has, or fails."""
        why = None
        if state.suspicion is not None and state.suspicion.is_certain:
            why = _lost_while(state)
        elif state.output_tokens and not state.spec.can_migrate:
            why = "its engine was lost, and another cannot go on with this request"
        if why is None:
            self.orphans.requeued += 1
            return self._to_pool(state, now_s, None)
        return self._fail(state, why, now_s)

    def _fail(self, state: RequestState, why: str, now_s: float) -> Fail:
        self.orphans.failed += 1
        self.pool.remove(state.request_id)
        self.started.pop(state.request_id, None)
        self.deadlines.drop(state.request_id)
        self.loads.remove(state)
        self.switches.ended(state.request_id, now_s)
        return Fail(state.request_id, why)

    def _suspect(self, engines: Collection[int], *, killed: bool) -> None:
        """Engines are lost whose groups may have computed the prompts of these requests, or parts of them.

        An engine that was killed from outside, by the kernel for want of memory or by an operator, makes those suspects
        whose engine was lost before.
        """
        prefixes = {one.part.request_id: request_id for request_id, one in self.splits.open.items() if one.in_prompt}
        computed: defaultdict[str, set[Group]] = defaultdict(set)
        broken = {group: work for engine in engines for group, work in self.loads.of_engine(engine).items()}
        for group, work in broken.items():
            begun = 0  # the first in the group may be in the step under way or in the next one
            for booked, state in work.requests.items():
                if state.prefill_tokens and begun < self._step_tokens:
                    computed[prefixes.get(booked, booked)].add(group)
                begun += state.prefill_tokens
        states = [self.started[one] for one in computed if one in self.started]  # what is pulled ahead computes nothing
        suspects = [state for state in states if state.losses or not killed]
        beside = Counter(group for state in suspects for group in computed[state.request_id])
        for state in states:
            groups = computed[state.request_id]
            if killed and not state.losses:
                state.suspicion = Suspicion.of_killed()
            else:
                members = frozenset(engine for group in groups for engine in group)
                most = max(beside[group] for group in groups)
                state.suspicion = suspected(state.suspicion, most, members)

    def _forget_kv(self, state: RequestState) -> None:
        """What a group offers that has lost an engine is nobody's."""
        if state.kv is not None and not self.lost.isdisjoint(state.kv.group):
            state.kv = None

    def _regroup(self, layout: Layout) -> None:
        """Go on with what is left of a layout, and choose between those of the engines that are there."""
        self.layout = layout.without(self.lost)
        every = Layout.all(self.settings.engines, self._sizes)
        self._layouts = list(dict.fromkeys(one.without(self.lost) for one in every))
        self.formable = sorted({size for one in self._layouts for size in one.shape})
        self.pool.revise(self._size_again)

    def _size_again(self, state: RequestState) -> None:
        """A request that waits has no use for groups that cannot be formed, and for wider ones once they can be."""
        most_tokens, needed = self.settings.capacity.most_tokens, needed_tokens(state)
        holding = [size for size in self.placing.sizes(state.spec) if most_tokens[size] >= needed]
        state.sizes = self.lengths.sizes(state, holding, self.formable)


def _trust(state: RequestState, engine: int) -> None:
    """An engine is back: one that was suspected there may have it again."""
    if state.suspicion is not None:
        state.suspicion = state.suspicion.without(engine)


def _lost_while(state: RequestState) -> str:
    return f"its engine was lost {state.losses} times while it computed the prompt of this request"
