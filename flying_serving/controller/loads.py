"""The load of each group: its requests, its unfinished prompts, its booked KV tokens."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from flying_serving.controller.requests import RequestState
from flying_serving.layout.groups import Group
from flying_serving.policy.snapshot import GroupLoad
from flying_serving.predict.demand import Outputs


@dataclass
class GroupWork:
    """The requests of one group, and sums over them.

    `wide`: requests that one engine cannot hold. `variants`: how many requests ask for each,
    and None: for the model itself.
    """

    requests: dict[str, RequestState] = field(default_factory=dict)
    wide: dict[str, RequestState] = field(default_factory=dict)
    prefill_tokens: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    committed_tokens: float = 0.0
    urgent: int = 0
    variants: Counter[int | None] = field(default_factory=Counter)


class Loads:
    """Groups with requests, in the present layout and in older ones.

    `unfinished`: requests that run and have no token of their group yet.
    """

    def __init__(self) -> None:
        self._groups: defaultdict[Group, GroupWork] = defaultdict(GroupWork)
        self._of_engine: defaultdict[int, dict[Group, GroupWork]] = defaultdict(dict)
        self._idle = GroupWork()
        self.unfinished: dict[str, RequestState] = {}

    def __getitem__(self, group: Group) -> GroupWork:
        return self._groups.get(group, self._idle)

    @property
    def groups(self) -> list[Group]:
        """Groups that have requests now."""
        return list(self._groups)

    def add(
        self, request: RequestState, group: Group, expected_tokens: float, *, with_kv: bool = False
    ) -> None:
        """Book a request in `group` from now on, with its KV if `with_kv`.

        `expected_tokens`: prompt and output tokens at its end.
        """
        request.prefill_tokens = request.to_prefill(with_kv=with_kv)
        request.group, request.admitted = group, True
        request.committed_tokens = expected_tokens
        work = self._groups[group]
        if not work.requests:
            for engine in group:
                self._of_engine[engine][group] = work
        work.requests[request.request_id] = request
        if request.sizes[0] > 1:
            work.wide[request.request_id] = request
        work.prefill_tokens += request.prefill_tokens
        work.prompts += 1
        work.prompt_tokens += request.spec.prompt_tokens
        work.output_tokens += request.output_tokens
        work.committed_tokens += expected_tokens
        if request.spec.urgent:
            work.urgent += 1
        work.variants[request.spec.variant] += 1
        self.unfinished[request.request_id] = request

    def add_tokens(self, request: RequestState, count: int) -> None:
        """Count tokens that a request got, which end its prompt."""
        assert request.group is not None
        work = self._groups[request.group]
        request.output_tokens += count
        work.output_tokens += count
        request.suspicion = request.suspicion.resting()
        if request.prefill_tokens:
            work.prefill_tokens -= request.prefill_tokens
            work.prompts -= 1
            request.prefill_tokens = 0
            del self.unfinished[request.request_id]

    def rebook(self, request: RequestState, expected_tokens: float) -> None:
        """Book another number of tokens of prompt and output for a request that runs."""
        assert request.group is not None
        work = self._groups[request.group]
        work.committed_tokens += expected_tokens - request.committed_tokens
        request.committed_tokens = expected_tokens

    def remove(self, request: RequestState) -> None:
        """Take a request out of its group: it does not run any more."""
        if request.group is None:
            return
        work = self._groups[request.group]
        del work.requests[request.request_id]
        work.wide.pop(request.request_id, None)
        if request.prefill_tokens:
            work.prefill_tokens -= request.prefill_tokens
            work.prompts -= 1
        if request.spec.urgent:
            work.urgent -= 1
        work.variants[request.spec.variant] -= 1
        work.variants += Counter()  # without variants of no request
        work.prompt_tokens -= request.spec.prompt_tokens
        work.output_tokens -= request.output_tokens
        work.committed_tokens -= request.committed_tokens
        self.unfinished.pop(request.request_id, None)
        if not work.requests:
            del self._groups[request.group]
            for engine in request.group:
                del self._of_engine[engine][request.group]
        request.group = None

    def check_integrity(self) -> None:
        """Raise AssertionError unless each group's sums are those of its requests."""
        for group, work in self._groups.items():
            requests = work.requests.values()
            sums = {
                "prefill_tokens": sum(request.prefill_tokens for request in requests),
                "prompts": len([request for request in requests if request.prefill_tokens]),
                "prompt_tokens": sum(request.spec.prompt_tokens for request in requests),
                "output_tokens": sum(request.output_tokens for request in requests),
                "urgent": len([request for request in requests if request.spec.urgent]),
                "variants": Counter(request.spec.variant for request in requests),
            }
            booked = {name: getattr(work, name) for name in sums}
            assert booked == sums, f"group {group}: {booked}, but its requests have {sums}"

            committed_tokens = sum(request.committed_tokens for request in requests)
            difference = abs(work.committed_tokens - committed_tokens)
            assert difference < 1e-6, (
                f"group {group}: {difference} tokens are booked for no request"
            )

    def of_engine(self, engine: int) -> Mapping[Group, GroupWork]:
        """Return the groups with requests that this engine is a member of."""
        return self._of_engine[engine]

    def as_seen(self, outputs: Outputs) -> dict[Group, GroupLoad]:
        """Return the load of each group as a policy sees it; `outputs`: how many tokens requests
        get.
        """
        loads = {}
        for group, work in self._groups.items():
            count = len(work.requests)
            output_tokens = work.output_tokens / count
            context = work.prompt_tokens / count + output_tokens
            left, longest = outputs.left(output_tokens), outputs.longest(output_tokens, count)
            wide = _by_least_size(work.wide.values(), outputs) if work.wide else {}
            loads[group] = GroupLoad(
                count,
                left,
                longest,
                context,
                work.prefill_tokens,
                work.prompts,
                wide,
                work.urgent,
                work.committed_tokens,
            )
        return loads


def _by_least_size(wide: Collection[RequestState], outputs: Outputs) -> dict[int, GroupLoad]:
    """Return `GroupLoad.by_least_size` of the requests that one engine cannot hold."""
    widest = max(request.sizes[0] for request in wide)
    engines = [2**power for power in range(1, widest.bit_length())]
    return {
        least: _load([request for request in wide if request.sizes[0] >= least], outputs)
        for least in engines
    }


def _load(requests: Collection[RequestState], outputs: Outputs) -> GroupLoad:
    """Return the load of requests, from the tokens that each of them has got."""
    count = len(requests)
    left_tokens = [
        min(
            outputs.left(request.output_tokens),
            max(1.0, request.spec.max_output_tokens - request.output_tokens),
        )
        for request in requests
    ]
    context_tokens = sum(request.context_tokens for request in requests) / count
    prefill = [request.prefill_tokens for request in requests if request.prefill_tokens]
    return GroupLoad(
        count,
        sum(left_tokens) / count,
        max(left_tokens),
        context_tokens,
        sum(prefill),
        len(prefill),
    )
