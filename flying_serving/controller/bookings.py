"""Bookings of requests in groups, and their ends. Each change is a command."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from flying_serving.controller.commands import Command, Dispatch, Recall
from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.requests import RequestState
from flying_serving.controller.settings import Settings
from flying_serving.controller.state import ClusterState
from flying_serving.layout.groups import Group, KVSource, Layout
from flying_serving.predict.work import LaneFigures


class Bookings:
    """Books each request in a group."""

    def __init__(self, state: ClusterState, choice: GroupChoice) -> None:
        self._state = state
        self._choice = choice

    def start(
        self, request: RequestState, group: Group, lanes: Mapping[int, LaneFigures]
    ) -> Dispatch:
        """Book a request in a group, with its KV if that can migrate."""
        state, choice = self._state, self._choice
        if choice.migration(request, group, lanes) is None:
            request.kv = None
        booked_tokens = choice.booked_tokens(request, group, state.lengths.expected_tokens(request))
        state.loads.add(request, group, booked_tokens, with_kv=request.kv is not None)
        return self.send(request, group)

    def send(self, request: RequestState, group: Group) -> Dispatch:
        """Dispatch a request to the group in which it is booked."""
        state, spec = self._state, request.spec
        state.started[request.request_id] = request
        limit_tokens = state.rooms.of_request(request, group) - spec.prompt_tokens

        # a request that may fill its group goes on in another one, which pulls its KV under this
        # offer
        exceeds = spec.max_output_tokens > limit_tokens
        exceeds = exceeds and self._choice.may_exceed(request, group)
        offers = exceeds and state.migrates and state.lengths.goes_on(request)
        request.offer = state.new_offer(group).number if offers else None

        output_tokens = request.output_tokens
        return Dispatch(
            request.request_id, group, output_tokens, limit_tokens, request.kv, request.offer
        )

    def suspend(self, request: RequestState, now_s: float, kv: KVSource | None) -> Recall:
        """Take a request out of its group, which offers its KV as `kv`, or not at all."""
        state, group = self._state, request.group
        assert group is not None and request.request_id not in state.splits
        del state.started[request.request_id]
        state.loads.remove(request)
        request.kv, request.offer = kv, None
        request.suspicion = request.suspicion.awake()
        request.sizes = request.fitting(state.settings.capacity.most_tokens)
        state.switches.migrated(request.request_id, now_s)
        return Recall(request.request_id, group, None if kv is None else kv.number)

    def requeue(self, request: RequestState, now_s: float, kv: KVSource | None) -> Recall:
        """Let a request that has a group wait for another one."""
        recall = self.suspend(request, now_s, kv)
        self._state.pool.add(request)
        return recall

    def recall(
        self, request_ids: Collection[str], now_s: float, *, also_begun: bool
    ) -> list[Command]:
        """Let requests wait that run in groups which the layout lacks, if they may leave these: see
        `to_migrate`.

        An urgent request stays if it would have to wait for room.
        """
        state = self._state
        running = [
            request
            for request in state.started.values()
            if request.request_id in request_ids
            and (not request.spec.urgent or self._finds_room(request))
        ]
        recalled = to_migrate(running, state.layout, state.settings, also_begun=also_begun)
        return [
            self.requeue(request, now_s, self.offer_kv(request) if has_kv else None)
            for request, has_kv in recalled
        ]

    def _finds_room(self, request: RequestState) -> bool:
        """Return whether a group of the layout has room for a request now."""
        state = self._state
        expected_tokens = state.lengths.expected_tokens(request)
        group = self._choice.choose(request, state.layout, state.lane_figures(), expected_tokens)
        return group is not None

    def offer_kv(self, request: RequestState) -> KVSource | None:
        """Return an offer of a request's KV by its group; None if KV cannot migrate."""
        assert request.group is not None
        return self._state.new_offer(request.group) if self._state.migrates else None


class Leaving(NamedTuple):
    """A request that leaves its group. `has_kv`: the group has KV of it, or it came with KV."""

    request: RequestState
    has_kv: bool


def to_migrate(
    old: Iterable[RequestState], layout: Layout, settings: Settings, *, also_begun: bool
) -> list[Leaving]:
    """Return the requests that leave their groups, of requests in groups that `layout` lacks.

    Prompts leave that their group has not begun. With `also_begun` all requests leave that can
    migrate. A request stays if it asks for a degree, may have killed engines, or has no room in any
    group of `layout`.
    """
    ahead_tokens: Counter[Group] = Counter()
    sizes = {len(group) for group in layout.groups}
    leaving = []
    for request in old:
        assert request.group is not None
        # without a full step before it, a prompt may be in the step under way, or in the last one
        is_step_full = ahead_tokens[request.group] >= settings.limits.max_num_batched_tokens
        is_unbegun = request.prefill_tokens > 0 and is_step_full
        ahead_tokens[request.group] += request.prefill_tokens

        spec = request.spec
        may_leave = spec.degree is None and not request.stays
        fits = may_leave and sizes.intersection(request.fitting(settings.capacity.kv_tokens))
        if fits and (is_unbegun or (also_begun and spec.can_migrate)):
            leaving.append(Leaving(request, has_kv=not is_unbegun or request.kv is not None))
    return leaving
