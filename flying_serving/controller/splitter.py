"""Which requests two groups share, and what becomes of them: at the split, at an order, at the end."""

from collections.abc import Collection, Mapping

from flying_serving.controller.commands import Command, Dispatch, DispatchPrefix, DropPart, PullAhead, Recall
from flying_serving.controller.dispatcher import Dispatcher
from flying_serving.controller.requests import KVOffer, RequestState
from flying_serving.controller.splits import virtual_batch
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.split import Terms, plan
from flying_serving.predict.demand import expected_outputs
from flying_serving.predict.work import LaneFigures


class Splitter(Dispatcher):
    """A dispatcher that gives some requests two groups, where they ask for it or the policy does (`Policy.splits`)."""

    def part_failed(self, request_id: str) -> list[Command]:
        """The part of a split request cannot be sent: the request goes on as an ordinary one."""
        return self._unsplit(request_id, undone=True)

    def given_up(self, request_id: str) -> list[Command]:
        """A request ends where `group_full` found no other group for it: the KV that its group offers is nobody's."""
        state = self.started[request_id]
        return [] if state.group is None or state.offer is None else [Recall(request_id, state.group)]

    def _begin(
        self, state: RequestState, group: Group, lanes: Mapping[int, LaneFigures], kept: Collection[Group]
    ) -> list[Command]:
        """As the dispatcher; or in two groups, if the request asks for it or that is predicted to be better."""
        second = self._second(state, group, lanes, kept) if lanes and self._may_split(state) else None
        if second is None:
            return super()._begin(state, group, lanes, kept)
        asked = state.spec.split_at
        at = self._plan(state, group, second, lanes) if asked is None else asked
        if self._can_split(state, at, group, second):
            return self._split(state, at, group, second)
        return [self._start(state, second if asked is None and at == 0 else group, lanes)]

    def _may_split(self, state: RequestState) -> bool:
        """Whether a request may have two groups: one that can migrate and has not begun."""
        spec, plans = state.spec, self.settings.policy.splits and not self.settings.dry_run
        migrates = bool(self.migrates) and spec.may_change_group
        return state.is_new and migrates and (plans or spec.split_at is not None)

    def _second(
        self, state: RequestState, first: Group, lanes: Mapping[int, LaneFigures], kept: Collection[Group]
    ) -> Group | None:
        """The best other group with room: of the same size, unless the request asks for the split."""
        others = [group for group in self.layout.groups if group != first and group not in kept]
        rest = tuple(one for one in others if state.spec.split_at is not None or len(one) == len(first))
        tokens = self.lengths.tokens(state)
        return self.placing.place(state, Layout(rest), self.loads, lanes, tokens) if rest else None

    def _plan(self, state: RequestState, first: Group, second: Group, lanes: Mapping[int, LaneFigures]) -> int:
        """Where to split a request: 0 if all of it should go to the second group, its length if to the first."""
        spec = state.spec
        handoff = lanes[len(second)].migration
        assert handoff is not None
        outputs = expected_outputs(self.demand.output_tokens, spec.max_output_tokens, spec.expected_tokens)
        block_tokens = self.settings.capacity.block_tokens.get(len(first), 1)
        terms = Terms(lanes[len(first)], handoff, block_tokens, self.settings.tbt_slo_s)
        a, b = virtual_batch(self.loads[first]), virtual_batch(self.loads[second])
        at = plan(spec.prompt_tokens, outputs, a, b, terms).split
        return at if at < spec.prompt_tokens + outputs else spec.prompt_tokens + spec.max_output_tokens

    def _can_split(self, state: RequestState, at: int, first: Group, second: Group) -> bool:
        """Whether both groups have something to do, and room for a further token at the split."""
        spec, tokens = state.spec, self.settings.capacity.tokens
        if at < spec.prompt_tokens:
            return at > 0 and spec.prompt_splits
        ends_before = at + 1 - spec.prompt_tokens >= spec.max_output_tokens
        return not ends_before and at + 1 < min(tokens[len(first)], tokens[len(second)])

    def _split(self, state: RequestState, at: int, first: Group, second: Group) -> list[Command]:
        request_id, kv = state.request_id, KVOffer(first, next(self._offers))
        booked_tokens = self.placing.booked_tokens(state, second, self.lengths.tokens(state))
        if self.splits.begin(state, at, kv, second, booked_tokens).in_prompt:
            return [DispatchPrefix(request_id, first, at, kv.number), self._send(state, second)]
        self.started[request_id] = state
        limit = at + 1 - state.spec.prompt_tokens
        dispatch = Dispatch(request_id, first, 0, limit, None, kv.number, publishes=True)
        return [dispatch, PullAhead(request_id, second, kv, at)]

    def _unsplit(self, request_id: str, *, undone: bool) -> list[Command]:
        """A split request becomes an ordinary one; if not `undone`, it is over."""
        split = self.splits.end(request_id, undone=undone)
        if split is None:
            return []
        return [DropPart(request_id, split.part_group, split.kv.number, keeps=undone and split.in_prompt)]

    def _hand_off(self, state: RequestState, now_s: float) -> list[Command]:
        """A request has come to its split: the group that has pulled its KV goes on. Nothing if it is not split so."""
        if state.request_id not in self.splits or self.splits.in_prompt(state.request_id):
            return []
        split = self.splits.end(state.request_id)
        assert split is not None
        self._suspend(state, now_s, split.kv)
        return [self._start(state, split.second, self.lanes())]
