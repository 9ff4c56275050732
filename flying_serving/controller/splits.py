"""Requests that two groups compute: DynaServe's micro-requests (its section 3).

The first group computes the tokens before a split and offers their KV while it does. The second
pulls it behind the computation and computes the rest.

- A split inside the prompt. The first group gets a *prefix*, a request of its own of the tokens
  before the split; its output is dropped. The second gets the request itself, with the prefix's
  KV.
- A split at the prompt's end or behind it. The first group gets the request itself, which ends
  there at the split. The second pulls ahead the KV with which it will go on.

Beside the request itself, its *part* is booked: the prefix in the first group, or the pulled KV in
the second. So each group has its share of the work, and room for the KV.
"""

from dataclasses import dataclass, field, replace

from flying_serving.controller.loads import GroupWork, Loads
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.layout.groups import Group, KVSource, Layout
from flying_serving.policy.split import VirtualBatch


@dataclass(frozen=True)
class Split:
    """A request on two groups.

    `at`: the first token of the second group, of prompt and output. `kv`: the offer under which the
    first group offers the KV of the tokens before. `in_prompt`: True if the first group has a
    prefix, False if it has the request itself. `part`: as booked.
    """

    at: int
    kv: KVSource
    second: Group
    in_prompt: bool
    part: RequestState

    @property
    def part_group(self) -> Group:
        """The group that has its part."""
        return self.kv.group if self.in_prompt else self.second


@dataclass
class SplitCounts:
    """Splits since the start: inside prompts, and in outputs or at the prompt's end.

    `undone`: splits that were undone because a group went away, a part failed, or the first group
    should keep the request. `replanned`: requests that were planned again while they ran; `moved`:
    of these, the ones that went to another group.
    """

    prompt: int = 0
    output: int = 0
    undone: int = 0
    replanned: int = 0
    moved: int = 0


@dataclass
class Splits:
    """The split requests of a server and where their parts are booked.

    `open`: requests that are split now, the oldest first.
    """

    loads: Loads
    counts: SplitCounts = field(default_factory=SplitCounts)
    open: dict[str, Split] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.open

    def begin(
        self, request: RequestState, at: int, kv: KVSource, second: Group, expected_tokens: float
    ) -> Split:
        """Book a request on two groups; it will have `expected_tokens` at its end."""
        prompt_tokens, first = request.spec.prompt_tokens, kv.group
        whole = request.spec
        spec = RequestSpec(
            at, at + 1, priority=whole.priority, can_migrate=False, variant=whole.variant
        )
        part = replace(request, request_id=f"{request.request_id} (part)", spec=spec)
        in_prompt = at < prompt_tokens
        if in_prompt:
            self.loads.add(part, first, at + 1.0)
            request.kv, request.prefill_tokens = kv, prompt_tokens - at
            self.loads.add(request, second, expected_tokens, with_kv=True)
            self.counts.prompt += 1
        else:
            self.loads.add(request, first, at + 1.0)
            request.offer = kv.number
            self.loads.add(part, second, expected_tokens, with_kv=True)
            self.counts.output += 1
        split = self.open[request.request_id] = Split(at, kv, second, in_prompt, part)
        return split

    def end(self, request_id: str, *, undone: bool = False) -> Split | None:
        """End the part of a request, which is an ordinary one from then on, or over. None if it was
        not split.
        """
        split = self.open.pop(request_id, None)
        if split is not None:
            self.loads.remove(split.part)
            if undone:
                self.counts.undone += 1
        return split

    def without(self, layout: Layout) -> list[str]:
        """Return the split requests of which `layout` lacks a group."""
        return [
            request_id
            for request_id, split in self.open.items()
            if not {split.kv.group, split.second} <= set(layout.groups)
        ]

    def in_prompt(self, request_id: str) -> bool:
        """Return whether a request has a prefix somewhere."""
        split = self.open.get(request_id)
        return split is not None and split.in_prompt


def virtual_batch(work: GroupWork, without: str | None = None) -> VirtualBatch:
    """Return the load of a group as a planner sees it. Prefixes are prompts only.

    `without`: a booked request that is left out.
    """
    prefill_tokens, sequences = 0, 0
    pairs = context_tokens = tokens_left = 0.0
    for name, request in work.requests.items():
        if name == without:
            continue
        context, prefill = request.context_tokens, request.prefill_tokens
        left = request.committed_tokens - context
        prefill_tokens += prefill
        pairs += prefill * (context - prefill / 2)
        if left > 1.0 or not prefill:
            sequences += 1
            context_tokens += context
            tokens_left += max(1.0, left)
    count = max(1, sequences)
    return VirtualBatch(
        prefill_tokens, sequences, context_tokens / count, tokens_left / count, pairs
    )
