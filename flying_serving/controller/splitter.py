"""Requests that two groups share: the place of the split, and its end."""

from collections.abc import Collection, Mapping

from flying_serving.controller.bookings import Bookings
from flying_serving.controller.commands import (
    Command,
    Dispatch,
    DispatchPrefix,
    DropPart,
    PullAhead,
)
from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.requests import RequestState
from flying_serving.controller.splits import virtual_batch
from flying_serving.controller.state import ClusterState
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.split import Terms, plan
from flying_serving.predict.work import LaneFigures


class Splitter:
    """Gives some requests two groups, if they ask for it or the policy does (`Policy.splits`)."""

    def __init__(self, state: ClusterState, choice: GroupChoice, bookings: Bookings) -> None:
        self._state = state
        self._choice = choice
        self._bookings = bookings

    def begin(
        self,
        request: RequestState,
        group: Group,
        lanes: Mapping[int, LaneFigures],
        reserved: Collection[Group],
    ) -> list[Command]:
        """Start a request in `group`, or in two groups if it asks for that or that is predicted
        better.

        The groups in `reserved` have no room for it.
        """
        start = self._bookings.start
        second = None
        if lanes and self._may_split(request):
            second = self._second(request, group, lanes, reserved)
        if second is None:
            return [start(request, group, lanes)]

        split_at = request.spec.split_at
        at = self._plan(request, group, second, lanes) if split_at is None else split_at
        if self._can_split(request, at, group, second):
            return self._split(request, at, group, second)
        belongs_to_second = split_at is None and at == 0
        return [start(request, second if belongs_to_second else group, lanes)]

    def undo(self, request_id: str) -> list[Command]:
        """Let a split request go on as an ordinary one. Do nothing if it is not split."""
        return self._drop_part(request_id, undone=True)

    def end(self, request_id: str) -> list[Command]:
        """Drop the part, if there is one, of a request that is over."""
        return self._drop_part(request_id, undone=False)

    def prefix_ended(self, request_id: str, *, failed: bool) -> list[Command]:
        """Leave the whole request to the second group from now on, also if its prefix has
        failed.
        """
        if failed:
            return self.undo(request_id)
        self._state.splits.end(request_id)
        return []

    def hand_off(self, request: RequestState, now_s: float) -> list[Command]:
        """Let the group that has pulled the KV go on with a request that has reached its split.

        Do nothing if it is not split, or inside its prompt.
        """
        splits = self._state.splits
        if request.request_id not in splits or splits.in_prompt(request.request_id):
            return []
        split = splits.end(request.request_id)
        assert split is not None
        self._bookings.suspend(request, now_s, split.kv)
        return [self._bookings.start(request, split.second, self._state.lanes())]

    def _drop_part(self, request_id: str, *, undone: bool) -> list[Command]:
        split = self._state.splits.end(request_id, undone=undone)
        if split is None:
            return []
        keeps = undone and split.in_prompt
        return [DropPart(request_id, split.part_group, split.kv.number, keeps=keeps)]

    # ---- the place of a split

    def _may_split(self, request: RequestState) -> bool:
        """Return whether a request may have two groups: it can migrate and has not begun."""
        spec, settings = request.spec, self._state.settings
        plans = settings.policy.splits and not settings.dry_run
        migrates = bool(self._state.migrates) and spec.may_change_group
        return request.is_new and migrates and (plans or spec.split_at is not None)

    def _second(
        self,
        request: RequestState,
        first: Group,
        lanes: Mapping[int, LaneFigures],
        reserved: Collection[Group],
    ) -> Group | None:
        """Return the best other group with room, of the same size unless the request says where to
        split.
        """
        any_size = request.spec.split_at is not None
        others = tuple(
            group
            for group in self._state.layout.groups
            if group != first and group not in reserved and (any_size or len(group) == len(first))
        )
        if not others:
            return None
        expected_tokens = self._state.lengths.expected_tokens(request)
        return self._choice.choose(request, Layout(others), lanes, expected_tokens)

    def _plan(
        self, request: RequestState, first: Group, second: Group, lanes: Mapping[int, LaneFigures]
    ) -> int:
        """Return the token at which to split a request.

        It is 0 if the second group should have the whole request, and its length if the first
        should.
        """
        spec, state = request.spec, self._state
        handoff = lanes[len(second)].migration
        assert handoff is not None
        outputs = state.lengths.planned_outputs(request)
        block_tokens = state.settings.capacity.block_tokens.get(len(first), 1)
        terms = Terms(lanes[len(first)], handoff, block_tokens, state.settings.tbt_slo_s)
        first_batch, second_batch = (
            virtual_batch(state.loads[first]),
            virtual_batch(state.loads[second]),
        )
        at = plan(spec.prompt_tokens, outputs, first_batch, second_batch, terms).split
        is_inside = at < spec.prompt_tokens + outputs
        return at if is_inside else spec.prompt_tokens + spec.max_output_tokens

    def _can_split(self, request: RequestState, at: int, first: Group, second: Group) -> bool:
        """Return whether both groups have something to do, and room for a further token at the
        split.
        """
        spec, tokens = request.spec, self._state.settings.capacity.kv_tokens
        if at < spec.prompt_tokens:
            return at > 0 and spec.prompt_splits
        ends_before = at + 1 - spec.prompt_tokens >= spec.max_output_tokens
        return not ends_before and at + 1 < min(tokens[len(first)], tokens[len(second)])

    def _split(self, request: RequestState, at: int, first: Group, second: Group) -> list[Command]:
        state, request_id = self._state, request.request_id
        kv = state.new_offer(first)
        expected_tokens = state.lengths.expected_tokens(request)
        booked_tokens = self._choice.booked_tokens(request, second, expected_tokens)
        split = state.splits.begin(request, at, kv, second, booked_tokens)
        if split.in_prompt:
            prefix = DispatchPrefix(request_id, first, at, kv.number)
            return [prefix, self._bookings.send(request, second)]

        state.started[request_id] = request
        limit_tokens = at + 1 - request.spec.prompt_tokens
        dispatch = Dispatch(request_id, first, 0, limit_tokens, None, kv.number, publishes=True)
        return [dispatch, PullAhead(request_id, second, kv, at)]
