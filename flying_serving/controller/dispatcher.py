"""What is known of a server, and where its requests run: they go to groups, back to the pool and on to other groups."""

from collections.abc import Collection, Mapping
from itertools import count

from flying_serving.controller.admission import Admission
from flying_serving.controller.commands import Command, Dispatch, Recall
from flying_serving.controller.deadlines import Deadlines
from flying_serving.controller.lending import needed_tokens
from flying_serving.controller.lengths import ExpectedLengths
from flying_serving.controller.loads import Loads
from flying_serving.controller.migrations import to_migrate
from flying_serving.controller.needs import needs_of
from flying_serving.controller.placing import Placing, is_wider, lacks_group
from flying_serving.controller.pool import TaskPool
from flying_serving.controller.requests import KVOffer, RequestState
from flying_serving.controller.settings import Settings
from flying_serving.controller.splits import Splits
from flying_serving.controller.switches import Switches
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.snapshot import Snapshot
from flying_serving.predict.demand import Demand
from flying_serving.predict.migrations import MigrationCost, cost_within
from flying_serving.predict.steps import StepModel
from flying_serving.predict.work import LaneFigures


class Dispatcher:
    """Books where each request is, and says so in commands; shows a policy what it needs to know. Base of Controller.

    `migrates`: what it takes to migrate KV between groups, by the size of the group that pulls it; where it is not
    known, at first nowhere, KV cannot migrate.
    """

    def __init__(self, settings: Settings, placing: Placing | None) -> None:
        self.settings = settings
        self.placing = placing or Placing(settings.capacity, settings.limits, settings.engines)
        self.lending = self.placing.lending
        self._sizes = sorted(settings.capacity.tokens)
        pinned = settings.policy.pinned_size
        self.layout = Layout.uniform(settings.engines, pinned(self._sizes) if pinned else 1)
        self.pool = TaskPool(settings.aging_s, self.lending.needs_loan, lambda state: is_wider(state, self.layout))
        self.loads = Loads()
        self.deadlines = Deadlines()
        self.admission = Admission(settings, self.pool, self.loads, lambda: self.layout.groups)
        self.splits = Splits(self.loads)
        self.steps = StepModel()
        self.migrates: dict[int, MigrationCost] = {}
        self.demand = Demand()
        self.lengths = ExpectedLengths(settings, self.demand)
        self.switches = Switches()
        self.started: dict[str, RequestState] = {}
        self._offers = count(1)
        self._narrow_waits: set[Group] = set()
        """Widest groups whose engines a request waits for that asks for a lower degree."""
        self._layouts = Layout.all(settings.engines, self._sizes)
        self.formable = self._sizes
        """Sizes of groups of these layouts: those that engines which are there can form."""

    @property
    def running(self) -> int:
        """How many requests run."""
        return len(self.started)

    @property
    def open_requests(self) -> list[str]:
        """Ids of those that wait or run."""
        return [*(state.request_id for state in self.pool), *self.started]

    def group_of(self, request_id: str) -> Group | None:
        """Where a request runs."""
        return self.started[request_id].group if request_id in self.started else None

    # ---- what a policy sees

    def lanes(self) -> dict[int, LaneFigures]:
        """What a group of each size can do, as far as it was measured."""
        seqs, step_tokens = self.settings.limits.max_num_seqs, self.settings.limits.max_num_batched_tokens
        return {
            size: LaneFigures(
                self.steps.cost(size), seqs, self.lending.room_of(size, self.loads), step_tokens, migrates
            )
            for size, migrates in ((size, cost_within(self.migrates, size)) for size in self._sizes)
            if self.steps.known(size)
        }

    def snapshot(self, lanes: dict[int, LaneFigures], now_s: float) -> Snapshot:
        """What a policy sees now."""
        unfinished = self.loads.unfinished
        tokens = sum(state.prefill_tokens for state in unfinished.values())
        streaming = self.running + len(self.splits) - len(unfinished)  # a part is unfinished too
        work = self.demand.work(len(self.pool), tokens, streaming, now_s)
        loads = self.loads.as_seen(self.demand.outputs)
        pinned = self.lending.pinned(self.loads)
        layouts = [one for one in self._layouts if pinned.issubset(one.groups)] if pinned else self._layouts
        first = self.pool.first(now_s)
        begins = [*([] if first is None else [first]), *self.loads.unfinished.values()]
        urgent = self.pool.urgent + sum(self.loads[group].urgent for group in self.loads.groups)
        needs = needs_of(begins, urgent, self.formable, self.settings.engines, self.lending.needs_loan)
        promised = self.switches.promised(self.settings.objective.horizon_s, now_s)
        return Snapshot(
            now_s, self.layout, layouts, lanes, loads, work, needs, promised, self.lending.opens_in_s(now_s)
        )

    # ---- where requests run

    def _take_in(self, state: RequestState, now_s: float) -> None:
        """A request that arrives waits. If it needs a group, what the last one was formed for has come again."""
        self.pool.add(self.lengths.of_new(state, self.formable))
        self.deadlines.add(state)
        if state.spec.degree is None and state.sizes[0] > self._sizes[0]:
            self.switches.needed_again(now_s)

    def _place_waiting(self, now_s: float, *, splits: bool = True) -> list[Command]:
        """Offer groups of the layout to the requests that wait, in the pool's order; with `splits` perhaps two to one.

        All that suit a request without room are kept for it, as in vLLM: else a long one would never see enough memory
        free at once as long as short ones arrive.
        """
        self.lending.awaited, self._narrow_waits = set(), set()
        if not len(self.pool):
            return []
        commands: list[Command] = []
        lanes = self.lanes()
        kept: set[Group] = set()

        def place(state: RequestState) -> bool:
            free = Layout(tuple(group for group in self.layout.groups if group not in kept)) if kept else self.layout
            group = self.placing.place(state, free, self.loads, lanes, self.lengths.tokens(state))
            if group is None or group in kept:
                kept.update(self._kept_for(state, now_s))
                return False
            if not state.admitted:
                self.admission.pace.dispatched()
            commands.extend(self._begin(state, group, lanes, kept) if splits else [self._start(state, group, lanes)])
            return True

        self.pool.take(place, now_s)
        return commands

    def _kept_for(self, state: RequestState, now_s: float) -> list[Group]:
        """Groups that others may not have, as a request waits for room there; it may wait for weights instead.

        A suspect keeps none where it only waits for others; a degree that the layout lacks none before it is overdue.
        """
        lending = self.lending
        if lending.needs_loan(state):
            lending.awaited |= lending.stages.keys() & set(self.layout.groups)
        elif state.spec.degree is not None:
            narrow = {outer for outer in lending.stages if len(outer) != state.sizes[0]}
            self._narrow_waits |= narrow - lending.awaited
        if state.is_suspect or (lacks_group(state, self.layout) and self.pool.is_overdue(state, now_s)):
            return self.placing.short_of_memory(state, self.layout, self.loads, self.lengths.tokens(state))
        needed = needed_tokens(state)
        return [one for one in self.layout.groups if len(one) in state.sizes and lending.holds(one) >= needed]

    def _outside(self, layout: Layout) -> set[str]:
        """Requests that run in groups which `layout` lacks."""
        return {state.request_id for state in self.started.values() if state.group not in layout.groups}

    def _recall(self, old: Collection[str], now_s: float, *, streams: bool) -> list[Command]:
        """Take requests of older groups back into the pool, those with tokens only if `streams`: see `to_migrate`."""
        running = [state for state in self.started.values() if state.request_id in old]
        recalled = to_migrate(running, self.layout, self.settings, streams=streams)
        return [self._to_pool(state, now_s, self._recalled(state, has_kv=has_kv)) for state, has_kv in recalled]

    def _widen(self, draining: Collection[str], now_s: float) -> list[Command]:
        """After a soft switch: what idle engines have begun meanwhile migrates to their groups, no suspect one."""
        recalls, widened = list[Command](), list[tuple[RequestState, Group]]()
        for state in list(self.started.values()):
            assert state.group is not None
            group = self.layout.group_of(state.group[0])
            begun = len(state.group) == 1 and state.request_id not in draining
            may = state.spec.can_migrate and not state.is_suspect and len(group) in state.sizes
            if begun and may and group != state.group:
                recalls.append(self._suspend(state, now_s, self._recalled(state, has_kv=True)))
                widened.append((state, group))
        lanes = self.lanes()
        return recalls + [self._start(state, group, lanes) for state, group in widened]

    def _begin(
        self, state: RequestState, group: Group, lanes: Mapping[int, LaneFigures], kept: Collection[Group]
    ) -> list[Command]:
        """Start a request in `group`, the best one for it; those in `kept` have no room for it."""
        return [self._start(state, group, lanes)]

    def _start(self, state: RequestState, group: Group, lanes: Mapping[int, LaneFigures]) -> Dispatch:
        """Book a request in a group, with its KV if that can migrate."""
        if self.placing.migration(state, group, lanes) is None:
            state.kv = None
        booked_tokens = self.placing.booked_tokens(state, group, self.lengths.tokens(state))
        self.loads.add(state, group, booked_tokens, kept=state.kv is not None)
        return self._send(state, group)

    def _send(self, state: RequestState, group: Group) -> Dispatch:
        self.started[state.request_id] = state
        limit = self.lending.room(state, group) - state.spec.prompt_tokens
        exceeds = state.spec.max_output_tokens > limit and self.placing.may_exceed(state, group)
        offers = exceeds and self.migrates and self.lengths.goes_on(state)
        state.offer = next(self._offers) if offers else None
        return Dispatch(state.request_id, group, state.output_tokens, limit, state.kv, state.offer)

    def _sizes_ahead(self) -> set[int]:
        """Sizes of groups that there are, or will be without a decision."""
        return {len(group) for group in self.layout.groups}

    def _recalled(self, state: RequestState, *, has_kv: bool) -> KVOffer | None:
        """The offer of a request that leaves its group; None if it has no KV there, or that cannot migrate."""
        assert state.group is not None
        return KVOffer(state.group, next(self._offers)) if has_kv and self.migrates else None

    def _suspend(self, state: RequestState, now_s: float, kv: KVOffer | None) -> Recall:
        group = state.group
        assert group is not None and state.request_id not in self.splits
        del self.started[state.request_id]
        state.kv, state.offer = kv, None
        state.sizes = state.fitting(self.settings.capacity.most_tokens)
        self.loads.remove(state)
        self.switches.migrated(state.request_id, now_s)
        return Recall(state.request_id, group, None if kv is None else kv.number)

    def _to_pool(self, state: RequestState, now_s: float, kv: KVOffer | None) -> Recall:
        recall = self._suspend(state, now_s, kv)
        self.pool.add(state)
        return recall
