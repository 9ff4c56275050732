"""The choice of a request's group among the groups with room.

Groups that hold the likely length of the request come before the others, then the least `Score`
decides.
"""

from collections.abc import Mapping
from typing import NamedTuple

from flying_serving.controller.loads import GroupWork
from flying_serving.controller.price import Assignment
from flying_serving.controller.requests import RequestState
from flying_serving.controller.state import ClusterState
from flying_serving.controller.suspicion import Suspicion
from flying_serving.layout.groups import Group, Layout
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.work import LaneFigures

STEPS_AHEAD = 3
"""Steps' worth of prompts that a group has at most.

So it never lacks any, and few are stranded by a switch.
"""


class Score(NamedTuple):
    """A measure of a group for a request. The least score is the best; earlier fields decide first.

    `price`: in request-seconds (`Assignment.price_s`); without predictions, requests per engine.
    `kv_engines_missed`: engines with KV of the request outside the group; all, if it cannot
    migrate.
    `requests`: of the group.
    `group`: decides between groups that are alike.
    """

    price: float
    kv_engines_missed: int
    requests: int
    group: Group


class GroupChoice:
    """Chooses groups by capacity, loads and limits; it keeps no state of its own."""

    def __init__(self, state: ClusterState) -> None:
        self.state = state
        self.capacity = state.settings.capacity
        self.limits = state.settings.limits

    def choose(
        self,
        request: RequestState,
        layout: Layout,
        lanes: Mapping[int, LaneFigures],
        expected_tokens: float,
    ) -> Group | None:
        """Return the group for a request, or None if no suitable group has room.

        Groups that hold the likely length of the request come first. A degree is met exactly: by a
        group of `layout` if there is one, otherwise by any group of that size. Its steps are then
        woven into those of the present layout, as every engine keeps a lane for each size.
        """
        with_room: dict[Group, MigrationCost | None] = {}
        for group in self._suitable(request, layout):
            migration = self.migration(request, group, lanes)
            if self._has_room(request, group, expected_tokens, with_kv=migration is not None):
                with_room[group] = migration

        rooms = self.state.rooms
        lasting = [group for group in with_room if rooms.tokens(group) >= request.likely_tokens]
        return min(
            lasting or with_room,
            key=lambda group: self._score(request, group, lanes, with_room[group], expected_tokens),
            default=None,
        )

    def is_for(self, request: RequestState, group: Group, expected_tokens: float) -> bool:
        """Return whether a group keeps no room from a request. None does here."""
        return True

    def extra_room_for(self, request: RequestState) -> set[Group]:
        """Return the groups that are to get extra room for a request beside others. Here no group
        is: the request waits until others end.
        """
        return set()

    def needs_another_group(self, request: RequestState) -> bool:
        """Return whether a request without room is to get one more group, though there are groups
        that hold it. None is here: the request waits for these.
        """
        return False

    def short_of_memory(
        self, request: RequestState, layout: Layout, expected_tokens: float
    ) -> list[Group]:
        """Return the groups of `layout` where memory must become free before a request has room.

        The request may wait for a group that the layout lacks.
        """
        with_kv = request.kv is not None
        loads = self.state.loads
        short = {
            engine
            for group in self._suitable(request, layout)
            if self._may_begin(request, loads[group], with_kv=with_kv)
            and not self._has_memory(group, self.booked_tokens(request, group, expected_tokens))
            for engine in group
        }
        return [group for group in layout.groups if not short.isdisjoint(group)]

    def migration(
        self, request: RequestState, group: Group, lanes: Mapping[int, LaneFigures]
    ) -> MigrationCost | None:
        """Return the cost of migrating a request's KV to `group`. None: it has none, or KV cannot
        migrate.
        """
        lane = lanes.get(len(group))
        return None if request.kv is None or lane is None else lane.migration

    def booked_tokens(self, request: RequestState, group: Group, expected_tokens: float) -> float:
        """Return the tokens to book for a request in a group, without its state: the expected ones,
        up to its limit there.
        """
        tokens = min(expected_tokens, self.state.rooms.of_request(request, group))
        return self.capacity.in_blocks(len(group), tokens)

    def may_exceed(self, request: RequestState, group: Group) -> bool:
        """Return whether other groups hold a request which is as long as `group` holds."""
        most_tokens = self.capacity.most_tokens[len(group)]
        is_narrower = len(group) < request.sizes[-1]
        return is_narrower or self.state.rooms.of_request(request, group) < most_tokens

    def must_wait_for_engines(self, request: RequestState) -> bool:
        """Return whether a suspect has to wait until engines are back.

        It has to if each group that it might have includes the last engine.
        """
        absent = self.state.absent_engines
        if not request.suspicion.spares_last or not absent:
            return False
        size = request.sizes[0]
        return not self._present_groups(size) or size + len(absent) >= self.state.settings.engines

    # ---- groups that suit a request

    def _suitable(self, request: RequestState, layout: Layout) -> list[Group]:
        """Return the groups that hold a request; their other work does not matter."""
        groups = [group for group in layout.groups if len(group) in request.sizes]
        if request.is_suspect:
            groups = self._for_suspect(request)
        elif request.spec.degree is not None and not groups:
            groups = self._present_groups(request.sizes[0])
        needed, rooms = request.needed_tokens, self.state.rooms
        return [group for group in groups if rooms.is_open(group) and rooms.tokens(group) >= needed]

    def _present_groups(self, size: int) -> list[Group]:
        """Return the groups of a size whose engines are there, in the layout or not."""
        every = Layout.uniform(self.state.settings.engines, size).groups
        return [group for group in every if self.state.absent_engines.isdisjoint(group)]

    def _for_suspect(self, request: RequestState) -> list[Group]:
        """Return the groups for a request that may have killed engines: the narrowest that hold it.

        Groups with engines of its last group are left out if there are others: the server may find
        these engines lost one after the other. So are groups with too many suspects (`_admits`).
        """
        narrow = (
            [] if self.must_wait_for_engines(request) else self._present_groups(request.sizes[0])
        )
        groups = [group for group in narrow if request.suspicion.avoids.isdisjoint(group)] or narrow
        return [group for group in groups if _admits(self.state.loads[group], request.suspicion)]

    # ---- room

    def _has_room(
        self, request: RequestState, group: Group, expected_tokens: float, *, with_kv: bool
    ) -> bool:
        work = self.state.loads[group]
        is_limited = self.limits.capped or self.state.rooms.is_closing(group)
        if not work.requests or not is_limited:
            return True
        booked_tokens = self.booked_tokens(request, group, expected_tokens)
        return self._may_begin(request, work, with_kv=with_kv) and self._has_memory(
            group, booked_tokens
        )

    def _may_begin(self, request: RequestState, work: GroupWork, *, with_kv: bool) -> bool:
        """Return whether one more request may run there, and its prompt be computed soon."""
        step_tokens = self.limits.max_num_batched_tokens
        if len(work.requests) >= self.limits.max_num_seqs:
            return False
        if not work.prefill_tokens or request.spec.urgent:
            return True
        # a prompt that is longer than a step counts as one step
        ahead = work.prefill_tokens + min(request.to_prefill(with_kv=with_kv), step_tokens)
        return ahead <= STEPS_AHEAD * step_tokens

    def _has_memory(self, group: Group, tokens: float) -> bool:
        """Return whether each engine of a group has room for its part of `tokens` beside the
        running requests.
        """
        share = self._share(group, tokens, requests=1)
        return all(self._booked_share(engine) + share <= 1.0 for engine in group)

    def _booked_share(self, engine: int) -> float:
        """Return the share of an engine's KV memory that is booked."""
        return sum(
            self._share(group, work.committed_tokens, len(work.requests))
            for group, work in self.state.loads.of_engine(engine).items()
        )

    def _share(self, group: Group, tokens: float, requests: int) -> float:
        """Return the share of each engine's KV memory that some requests of a group take, with what
        each takes whatever its length.
        """
        of_request = self.capacity.request_tokens(len(group))
        room_tokens = self.state.rooms.shared(group) + of_request
        return (tokens + requests * of_request) / room_tokens

    # ---- the best of the groups with room

    def _score(
        self,
        request: RequestState,
        group: Group,
        lanes: Mapping[int, LaneFigures],
        migration: MigrationCost | None,
        expected_tokens: float,
    ) -> Score:
        """Return the score of a group. `migration`: the cost of migrating KV to it, None without
        KV.
        """
        kv_group = () if request.kv is None else request.kv.group
        reached = group if migration is not None else ()
        kv_engines_missed = len(set(kv_group).difference(reached))
        price = self._price(request, group, lanes, migration, expected_tokens)
        return Score(price, kv_engines_missed, len(self.state.loads[group].requests), group)

    def _price(
        self,
        request: RequestState,
        group: Group,
        lanes: Mapping[int, LaneFigures],
        migration: MigrationCost | None,
        expected_tokens: float,
    ) -> float:
        """Return the price of a group for a request, arguments as of `_score`."""
        drained, waits_in_queue = self._drained(group), not _asks_for_split(request)
        assignment = Assignment(
            request,
            self.state.loads[group],
            drained,
            expected_tokens,
            migration,
            self.limits.max_variants,
            waits_in_queue,
        )
        lane = lanes.get(len(group))
        per_engine = (assignment.running + assignment.drained) / len(group)
        return per_engine if lane is None else assignment.price_s(lane)

    def _drained(self, group: Group) -> int:
        """Return the requests of older groups that the engines of a group step in between."""
        loads = self.state.loads
        return sum(
            len(work.requests)
            for engine in group
            for other, work in loads.of_engine(engine).items()
            if other != group
        )


def _asks_for_split(request: RequestState) -> bool:
    """Return whether a request says where it is to be split. Both of its groups count it then, so
    that each may seem full.
    """
    spec = request.spec
    return request.is_new and spec.split_at is not None and spec.may_change_group


def _admits(work: GroupWork, suspicion: Suspicion) -> bool:
    """Return whether a group may have one more suspect: its suspects, and this one, each have to
    allow that many in their group (`Suspicion.max_suspects`).
    """
    limits = [
        request.suspicion.max_suspects
        for request in work.requests.values()
        if request.suspicion.max_suspects
    ]
    return all(len(limits) < limit for limit in (*limits, suspicion.max_suspects or 1))
