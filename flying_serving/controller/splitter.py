"""Requests that two groups share: the point of the split, its end, and lengths that turn out
otherwise.
"""

from collections.abc import Collection, Mapping
from itertools import islice

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
from flying_serving.controller.splits import Split, virtual_batch
from flying_serving.controller.state import ClusterState
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.split import PlannedLength, Rest, SplitCosts, is_better_elsewhere, plan
from flying_serving.predict.work import LaneFigures

MOST_AT_ONCE = 16
"""Requests that are planned again at a tick; others wait for the next. Each takes sums over the
requests of two groups.
"""


class Splitter:
    """Gives some requests two groups, if they ask for it or the policy does (`Policy.splits`).

    What the policy has planned is planned again once, if a length turns out otherwise (`replan`).
    """

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
            if request.spec.split_at is None:
                request.plan = PlannedLength(self._state.lengths.planned_outputs(request))
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
        return [self._bookings.start(request, split.second, self._state.lane_figures())]

    def replan(self, now_s: float) -> list[Command]:
        """Plan requests again whose lengths turn out otherwise than planned, each once.

        A request with more tokens than planned stays in its group or moves to another one. A split
        that is ahead of an output is undone if the first group should keep the rest.
        """
        if not self._plans:
            return []
        state = self._state
        longer = list(islice(filter(self._outgrew_its_plan, state.started.values()), MOST_AT_ONCE))
        others = (one for one in state.splits.open.items() if self._differs_from_its_plan(*one))
        ahead = list(islice(others, MOST_AT_ONCE))
        if not longer and not ahead:
            return []
        lanes = state.lane_figures()
        state.splits.counts.replanned += len(longer) + len(ahead)
        commands: list[Command] = []
        for request in longer:
            commands += self._move_or_stay(request, lanes, now_s)
        for request_id, split in ahead:
            commands += self._keep_or_undo(state.started[request_id], split, lanes)
        return commands

    def _drop_part(self, request_id: str, *, undone: bool) -> list[Command]:
        split = self._state.splits.end(request_id, undone=undone)
        if split is None:
            return []
        keeps = undone and split.in_prompt
        return [DropPart(request_id, split.part_group, split.kv.number, keeps=keeps)]

    # ---- the point of a split

    @property
    def _plans(self) -> bool:
        """True if the policy plans splits."""
        settings = self._state.settings
        return settings.policy.splits and not settings.dry_run

    def _may_split(self, request: RequestState) -> bool:
        """Return whether a request may have two groups: it can migrate, has not begun, and says
        where to split or was not planned before.
        """
        spec = request.spec
        migrates = bool(self._state.migrates) and spec.may_change_group
        plans = self._plans and request.plan is None
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
        spec, loads = request.spec, self._state.loads
        outputs = self._state.lengths.planned_outputs(request)
        batches = virtual_batch(loads[first]), virtual_batch(loads[second])
        made = plan(spec.prompt_tokens, outputs, *batches, self._costs(first, second, lanes))
        request.plan = PlannedLength(outputs, made.probes)
        is_inside = made.split < spec.prompt_tokens + outputs
        return made.split if is_inside else spec.prompt_tokens + spec.max_output_tokens

    def _costs(self, first: Group, second: Group, lanes: Mapping[int, LaneFigures]) -> SplitCosts:
        """Return what steps in two groups cost, and a handoff from the first to the second."""
        settings, handoff = self._state.settings, lanes[len(second)].migration
        assert handoff is not None
        block_tokens = settings.capacity.block_tokens.get(len(first), 1)
        return SplitCosts(lanes[len(first)], handoff, block_tokens, settings.tbt_slo_s)

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

    # ---- lengths that turn out otherwise

    def _outgrew_its_plan(self, request: RequestState) -> bool:
        """Return whether a request has more tokens than it was planned for, and may be planned
        again: it decodes in a group of the layout.
        """
        made = request.plan
        if made is None or request.output_tokens <= made.output_tokens:
            return False
        state = self._state
        decodes = not request.prefill_tokens and request.request_id not in state.splits
        may_move = not request.stays and request.group in state.layout.groups
        return made.may_change and decodes and may_move

    def _differs_from_its_plan(self, request_id: str, split: Split) -> bool:
        """Return whether a request that decodes ahead of its split is expected to have another
        length than planned, and may be planned again.
        """
        request = self._state.started[request_id]
        made = request.plan
        if made is None or not made.may_change or split.in_prompt or request.prefill_tokens:
            return False
        return made.differs_from(self._state.lengths.planned_outputs(request))

    def _move_or_stay(
        self, request: RequestState, lanes: Mapping[int, LaneFigures], now_s: float
    ) -> list[Command]:
        """Let a request that has more tokens than planned go on where that is better.

        Where it stays, its group's books have its new length from now on.
        """
        state, here = self._state, request.group
        assert here is not None and request.plan is not None
        request.plan = request.plan.again(state.lengths.revised_outputs(request))
        there = self._second(request, here, lanes, ())
        left = request.plan.output_tokens - request.output_tokens
        if there is not None and is_better_elsewhere(
            Rest(request.context_tokens, left),
            virtual_batch(state.loads[here], request.request_id),
            virtual_batch(state.loads[there]),
            self._costs(here, there, lanes),
        ):
            state.splits.counts.moved += 1
            recall = self._bookings.suspend(request, now_s, self._bookings.offer_kv(request))
            return [recall, self._bookings.start(request, there, lanes)]
        expected_tokens = state.lengths.expected_tokens(request)
        state.loads.rebook(request, self._choice.booked_tokens(request, here, expected_tokens))
        return []

    def _keep_or_undo(
        self, request: RequestState, split: Split, lanes: Mapping[int, LaneFigures]
    ) -> list[Command]:
        """Undo a split that is ahead of an output, unless the second group should have the rest.

        The rest is what was expected to be behind the split: its length is another one now.
        """
        state, second = self._state, split.second
        assert request.group is not None and request.plan is not None
        request.plan = request.plan.again(state.lengths.planned_outputs(request))
        left = request.spec.prompt_tokens + request.plan.output_tokens - split.at
        first_is_better = is_better_elsewhere(
            Rest(split.at, max(1, left)),
            virtual_batch(state.loads[second], split.part.request_id),
            virtual_batch(state.loads[request.group], request.request_id),
            self._costs(second, request.group, lanes),
        )
        return self.undo(request.request_id) if first_is_better else []
