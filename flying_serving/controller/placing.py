"""Where a request goes in the present layout: the group that will give it its first token soonest and has room."""

from collections.abc import Mapping

from flying_serving.controller.lending import WeightLending, needed_tokens
from flying_serving.controller.loads import GroupWork, Loads
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.settings import Capacity, Limits
from flying_serving.controller.suspicion import Suspicion
from flying_serving.errors import RequestError
from flying_serving.layout.groups import Group, Layout
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.work import LaneFigures

STEPS_AHEAD = 3
"""Steps' worth of prompts that a group has at most: it never lacks any, and few are stranded by a switch."""


class Placing:
    """Choices over capacity, loads and limits; keeps no state of its own but which groups lend their weights."""

    def __init__(self, capacity: Capacity, limits: Limits, engines: int) -> None:
        self.capacity = capacity
        self.limits = limits
        self._engines = engines
        self.lost: set[int] = set()
        """Engines that are not there."""
        self.lending = WeightLending(capacity, engines)

    def check(self, tokens: int, degree: int | None) -> tuple[int, ...]:
        """Group sizes that hold so many tokens of prompt and output, for a request that may ask for a degree.

        Raises:
            RequestError: if no layout of this server can ever run it; the message says what would do.
        """
        capacity = self.capacity
        if degree is not None and degree not in capacity.degrees:
            raise RequestError(f"tp_degree={degree}: must be one of {capacity.degrees}")
        sizes = capacity.fitting_sizes(tokens)
        if degree is not None:
            size = degree // capacity.devices
            if size not in sizes:
                enough = [capacity.degree(s) for s in sizes]
                hint = f"degree {enough[0]} would do" if enough else "no degree of this server holds them"
                raise RequestError(
                    f"tp_degree={degree}: its KV cache holds {capacity.most_tokens[size]} tokens, prompt plus "
                    f"max_tokens are {tokens}; {hint}"
                )
            return (size,)
        if not sizes:
            widest = max(capacity.tokens)
            raise RequestError(
                f"prompt plus max_tokens are {tokens} tokens; the widest group (degree {capacity.degree(widest)}) "
                f"holds {capacity.most_tokens[widest]}"
            )
        return tuple(sizes)

    def sizes(self, spec: RequestSpec) -> tuple[int, ...]:
        """Group sizes that a request may have. Raises RequestError if no layout ever holds all that it may take."""
        self.check(spec.longest_tokens, spec.degree)
        return self.check(spec.needed_tokens, spec.degree)

    def place(
        self,
        state: RequestState,
        layout: Layout,
        loads: Loads,
        lanes: Mapping[int, LaneFigures],
        expected_tokens: float,
    ) -> Group | None:
        """The group for it now, or None if none of those that suit has room.

        Groups that hold what it will probably have come first. A degree that is asked for is met exactly: by a present
        group if there is one, else by any group of that size, whose steps are then woven into the present layout's
        (every engine keeps a lane for each size).
        """
        groups = self._suitable(state, layout, loads)
        migrations = {group: self.migration(state, group, lanes) for group in groups}
        free = [
            group
            for group, migration in migrations.items()
            if self._has_room(state, group, loads, expected_tokens, kept=migration is not None)
        ]
        lasting = [group for group in free if self.lending.holds(group) >= state.likely_tokens] or free
        return min(lasting, key=lambda group: self._score(state, group, loads, lanes, migrations[group]), default=None)

    def short_of_memory(self, state: RequestState, layout: Layout, loads: Loads, expected_tokens: float) -> list[Group]:
        """The groups of a layout where memory has to become free before `state` has room in a group that suits it.

        That may be a group which the layout lacks.
        """
        kept = state.kv is not None
        short = {
            engine
            for group in self._suitable(state, layout, loads)
            if self._has_slot(state, loads[group], kept=kept)
            and not self._has_memory(group, loads, self.booked_tokens(state, group, expected_tokens))
            for engine in group
        }
        return [group for group in layout.groups if not short.isdisjoint(group)]

    def _suitable(self, state: RequestState, layout: Layout, loads: Loads) -> list[Group]:
        """Groups that hold it, whatever else they have to do."""
        groups = [group for group in layout.groups if len(group) in state.sizes]
        if state.suspicion is not None and state.is_suspect:
            groups = self._for_suspect(state, state.suspicion, loads)
        elif state.spec.degree is not None and not groups:
            groups = self._there(state.sizes[0])
        needed, lending = needed_tokens(state), self.lending
        return [group for group in groups if lending.is_open(group) and lending.holds(group) >= needed]

    def _there(self, size: int) -> list[Group]:
        """Groups of a size whose engines are there, in the layout or not."""
        return [group for group in Layout.uniform(self._engines, size).groups if self.lost.isdisjoint(group)]

    def _for_suspect(self, state: RequestState, suspicion: Suspicion, loads: Loads) -> list[Group]:
        """Of the groups of the fewest engines that hold a request which may have killed some, those that may have it.

        If there are any, none of its last group, whose loss may be noticed one engine after the other; no group with as
        many suspects as it, or one of them, may have beside itself.
        """
        narrow = [] if self.is_cornered(state) else self._there(state.sizes[0])
        groups = [group for group in narrow if suspicion.avoids.isdisjoint(group)] or narrow
        return [group for group in groups if _admits(loads[group], suspicion)]

    def is_cornered(self, state: RequestState) -> bool:
        """Whether a suspect has to wait for engines to come back: no group is there without which an engine is left."""
        suspicion = state.suspicion
        if suspicion is None or not suspicion.spares_last or not self.lost:
            return False
        return not self._there(state.sizes[0]) or state.sizes[0] + len(self.lost) >= self._engines

    def may_exceed(self, state: RequestState, group: Group) -> bool:
        """Whether there are groups that hold a request which is as long as `group` holds."""
        most_tokens = self.capacity.most_tokens[len(group)]
        return len(group) < state.sizes[-1] or self.lending.room(state, group) < most_tokens

    def migration(self, state: RequestState, group: Group, lanes: Mapping[int, LaneFigures]) -> MigrationCost | None:
        """What it takes to move its KV to `group`: None if it has none, or that cannot come along."""
        lane = lanes.get(len(group))
        return None if state.kv is None or lane is None else lane.migration

    def _has_room(self, state: RequestState, group: Group, loads: Loads, expected_tokens: float, *, kept: bool) -> bool:
        work = loads[group]
        if not work.requests or not (self.limits.capped or self.lending.is_called_back(group)):
            return True
        booked_tokens = self.booked_tokens(state, group, expected_tokens)
        return self._has_slot(state, work, kept=kept) and self._has_memory(group, loads, booked_tokens)

    def booked_tokens(self, state: RequestState, group: Group, expected_tokens: float) -> float:
        """Tokens that are booked in a group for a request of which so many are expected: no more than it gets there."""
        return min(expected_tokens, self.lending.room(state, group))

    def _has_slot(self, state: RequestState, work: GroupWork, *, kept: bool) -> bool:
        """Whether one more request may run there, and its prompt be computed soon."""
        if len(work.requests) >= self.limits.max_num_seqs:
            return False
        # a prompt longer than a step counts as one: it gets its turn like any other
        ahead = work.prefill_tokens + min(state.to_prefill(kept=kept), self.limits.max_num_batched_tokens)
        waits = work.prefill_tokens > 0 and not state.spec.urgent
        return not waits or ahead <= STEPS_AHEAD * self.limits.max_num_batched_tokens

    def _has_memory(self, group: Group, loads: Loads, tokens: float) -> bool:
        """Whether its engines have room for so many tokens beside what runs."""
        return all(self._share(engine, loads) + tokens / self.lending.shared(group, loads) <= 1.0 for engine in group)

    def _share(self, engine: int, loads: Loads) -> float:
        """Share of an engine's KV memory that is spoken for."""
        return sum(
            work.committed_tokens / self.lending.shared(group, loads) for group, work in loads.of_engine(engine).items()
        )

    def _score(
        self,
        state: RequestState,
        group: Group,
        loads: Loads,
        lanes: Mapping[int, LaneFigures],
        migration: MigrationCost | None,
    ) -> tuple[float, int, float, int, int, Group]:
        """Soonest first, with the time that its KV takes to get there; else nearest to its KV, then the emptiest.

        Where more may be placed than run at a time, first by how often a group would have to be emptied before; but not
        for one that says where it is split, as both its groups count such a request.
        """
        work = loads[group]
        shy = work.urgent > 0 and not state.spec.urgent
        count = len(work.requests)
        near = -len(set(group).intersection(state.kv.group)) if state.kv and migration else 0
        halved = state.is_new and state.spec.split_at is not None and state.spec.may_change_group
        rounds = 0 if halved else count // self.limits.max_num_seqs
        # an engine that still drains an older group's requests steps those in between
        others = sum(len(w.requests) for engine in group for g, w in loads.of_engine(engine).items() if g != group)
        lane = lanes.get(len(group))
        if lane is None:
            return (float(shy), rounds, (count + others) / len(group), near, count, group)
        to_prefill = state.to_prefill(kept=migration is not None)
        first_s = lane.cost.step_s(work.prefill_tokens + to_prefill, count, 0)
        drained_s = lane.cost.fixed_s * others
        migration_s = migration.seconds(state.context_tokens) if migration is not None else 0.0
        return (float(shy), rounds, first_s + drained_s + migration_s, near, count, group)


def lacks_group(state: RequestState, layout: Layout) -> bool:
    """Whether a request asks for a degree that no group of a layout has."""
    return state.spec.degree is not None and all(len(group) not in state.sizes for group in layout.groups)


def is_wider(state: RequestState, layout: Layout) -> bool:
    """Whether it asks for a higher degree than any group has: it needs room in several groups at once."""
    return lacks_group(state, layout) and state.sizes[0] > max(map(len, layout.groups), default=0)


def _admits(work: GroupWork, suspicion: Suspicion) -> bool:
    """Whether a group may have one more suspect: fewer than each of them may have in its group."""
    there = [one.suspicion.company for one in work.requests.values() if one.suspicion and one.suspicion.company]
    return all(len(there) < company for company in (*there, suspicion.company or 1))
