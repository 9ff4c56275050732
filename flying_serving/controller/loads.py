"""What every group has to do: requests, prompts that are not done, KV tokens that are spoken for."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from flying_serving.controller.requests import RequestState
from flying_serving.layout.groups import Group
from flying_serving.policy.snapshot import GroupLoad
from flying_serving.predict.demand import Outputs


@dataclass
class GroupWork:
    """The requests of one group, those of them that one engine cannot hold, and sums over them."""

    requests: dict[str, RequestState] = field(default_factory=dict)
    wide: dict[str, RequestState] = field(default_factory=dict)
    prefill_tokens: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    committed_tokens: float = 0.0
    urgent: int = 0


class Loads:
    """Groups with requests, in the present layout and in older ones."""

    def __init__(self) -> None:
        self._groups: defaultdict[Group, GroupWork] = defaultdict(GroupWork)
        self._of_engine: defaultdict[int, dict[Group, GroupWork]] = defaultdict(dict)
        self._idle = GroupWork()
        self.unfinished: dict[str, RequestState] = {}
        """Requests that run and have no token of their group yet."""

    def __getitem__(self, group: Group) -> GroupWork:
        return self._groups.get(group, self._idle)

    @property
    def groups(self) -> list[Group]:
        """Those with requests."""
        return list(self._groups)

    def add(self, state: RequestState, group: Group, expected_tokens: float, *, with_kv: bool = False) -> None:
        """`state` runs in `group` from now on, with its KV if `with_kv`, and will have `expected_tokens` at its end."""
        state.prefill_tokens = state.to_prefill(with_kv=with_kv)
        state.group, state.admitted = group, True
        state.committed_tokens = expected_tokens
        work = self._groups[group]
        if not work.requests:
            for engine in group:
                self._of_engine[engine][group] = work
        work.requests[state.request_id] = state
        if state.sizes[0] > 1:
            work.wide[state.request_id] = state
        work.prefill_tokens += state.prefill_tokens
        work.prompts += 1
        work.prompt_tokens += state.spec.prompt_tokens
        work.output_tokens += state.output_tokens
        work.committed_tokens += expected_tokens
        if state.spec.urgent:
            work.urgent += 1
        self.unfinished[state.request_id] = state

    def token(self, state: RequestState, count: int) -> None:
        """It got tokens, so its prompt is done."""
        assert state.group is not None
        work = self._groups[state.group]
        state.output_tokens += count
        work.output_tokens += count
        state.suspicion = None
        if state.prefill_tokens:
            work.prefill_tokens -= state.prefill_tokens
            work.prompts -= 1
            state.prefill_tokens = 0
            del self.unfinished[state.request_id]

    def remove(self, state: RequestState) -> None:
        """It does not run any more."""
        if state.group is None:
            return
        work = self._groups[state.group]
        del work.requests[state.request_id]
        work.wide.pop(state.request_id, None)
        if state.prefill_tokens:
            work.prefill_tokens -= state.prefill_tokens
            work.prompts -= 1
        if state.spec.urgent:
            work.urgent -= 1
        work.prompt_tokens -= state.spec.prompt_tokens
        work.output_tokens -= state.output_tokens
        work.committed_tokens -= state.committed_tokens
        self.unfinished.pop(state.request_id, None)
        if not work.requests:
            del self._groups[state.group]
            for engine in state.group:
                del self._of_engine[engine][state.group]
        state.group = None

    def check_integrity(self) -> None:
        """Raise AssertionError unless each group's sums are those of its requests."""
        for group, work in self._groups.items():
            requests = work.requests.values()
            sums = {
                "prefill_tokens": sum(request.prefill_tokens for request in requests),
                "prompts": sum(request.prefill_tokens > 0 for request in requests),
                "prompt_tokens": sum(request.spec.prompt_tokens for request in requests),
                "output_tokens": sum(request.output_tokens for request in requests),
                "urgent": sum(request.spec.urgent for request in requests),
            }
            booked = {name: getattr(work, name) for name in sums}
            assert booked == sums, f"group {group}: {booked}, but its requests have {sums}"

            committed_tokens = sum(request.committed_tokens for request in requests)
            difference = abs(work.committed_tokens - committed_tokens)
            assert difference < 1e-6, f"group {group}: {difference} tokens are booked for no request"

    def of_engine(self, engine: int) -> Mapping[Group, GroupWork]:
        """Groups with requests that this engine is a member of."""
        return self._of_engine[engine]

    def as_seen(self, outputs: Outputs) -> dict[Group, GroupLoad]:
        """For a policy; `outputs`: how many tokens requests get."""
        seen = {}
        for group, work in self._groups.items():
            count = len(work.requests)
            had = work.output_tokens / count
            context = work.prompt_tokens / count + had
            left, longest = outputs.left(had), outputs.longest(had, count)
            wide = _by_least_size(work.wide.values(), outputs) if work.wide else {}
            seen[group] = GroupLoad(count, left, longest, context, work.prefill_tokens, work.prompts, wide)
        return seen


def _by_least_size(wide: Collection[RequestState], outputs: Outputs) -> dict[int, GroupLoad]:
    """`GroupLoad.by_least_size` of those that one engine cannot hold."""
    widest = max(state.sizes[0] for state in wide)
    engines = [2**power for power in range(1, widest.bit_length())]
    return {least: _load([one for one in wide if one.sizes[0] >= least], outputs) for least in engines}


def _load(requests: Collection[RequestState], outputs: Outputs) -> GroupLoad:
    """These requests, each looked at."""
    count = len(requests)
    left = [
        min(outputs.left(one.output_tokens), max(1.0, one.spec.max_output_tokens - one.output_tokens))
        for one in requests
    ]
    context = sum(one.context_tokens for one in requests) / count
    prefill = [one.prefill_tokens for one in requests if one.prefill_tokens]
    return GroupLoad(count, sum(left) / count, max(left), context, sum(prefill), len(prefill))
