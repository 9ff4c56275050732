"""Split requests in the simulator: who computes which part, and how the KV gets from one part's
group to the other's.

As live, a request that is split inside its prompt has a part of its own in the first group, whose
output is dropped; one that is split later runs in the first group up to the split. The second group
pulls behind the computation, so that only the last chunk is waited for. Simpler than live: it takes
blocks for the KV when the request begins there.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from flying_lab.sim.cluster import Cluster
from flying_lab.sim.requests import SimRequest
from flying_serving.layout.groups import Group
from flying_serving.policy.split import Plan, Terms, VirtualBatch, plan
from flying_serving.predict.demand import expected_outputs
from flying_serving.predict.migrations import MigrationCost

PREFIX = "prefix of "
"""Begins the id of the part of a prompt that the first group computes."""


@dataclass(frozen=True)
class Splitting:
    """How a simulated server splits requests.

    Args:
        where: as planned, or always at the prompt's end: disaggregated serving.
        handoff: seconds until pulled KV is there, by tokens.
        behind: pulls go on behind the computation, else all KV is pulled at the split.
        hint: what clients say of the output that they expect, by the actual one; without, the
            learned mean is expected.
    """

    where: Literal["planned", "prompt"]
    handoff: MigrationCost
    behind: bool = True
    hint: Callable[[int], int] | None = None


@dataclass
class SplitLog:
    """What became of requests: their plans, seconds that planning took, and seconds that handoffs
    were waited for.
    """

    plans: list[Plan] = field(default_factory=list)
    planned_s: array[float] = field(default_factory=lambda: array("d"))
    waited_s: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True)
class _Part:
    """Tokens [`begin`, `end`) of a request, by its expected length, that a group was given, and
    what runs them.
    """

    request: SimRequest
    run: SimRequest
    begin: int
    end: int

    def done(self, group: Group) -> int:
        """Tokens that are computed."""
        run = self.run
        computed = run.context_tokens - 1 if run.tokens else run.computed_tokens
        return max(self.begin, computed if run.group == group else 0)


@dataclass(frozen=True)
class _Link:
    """A request's first part, whose end is the second one's beginning: in group `b`, up to
    `output_tokens`.
    """

    request: SimRequest
    a: Group
    b: Group
    output_tokens: int


class Splits:
    """Sends requests to pairs of groups, either of which may compute what comes first."""

    def __init__(
        self,
        cluster: Cluster,
        splitting: Splitting,
        terms: Callable[[], Terms],
        mean_outputs: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._splitting = splitting
        self._terms = terms
        self._mean_outputs = mean_outputs
        groups = sorted(cluster.lanes)
        pairs = list(zip(groups[::2], groups[1::2], strict=True))
        self._pairs = pairs if splitting.where == "prompt" else pairs + [(b, a) for a, b in pairs]
        self._parts: dict[Group, dict[str, _Part]] = {group: {} for group in groups}
        self._links: dict[str, _Link] = {}
        self.log = SplitLog()

    def send(self, request: SimRequest) -> None:
        """Plan a request and send it, or its first part, to a group."""
        expected = self._expected(request)
        (a, b), split = self._choose(request, expected)
        prompt, total = request.prompt_tokens, request.prompt_tokens + expected
        if split in (0, total):
            whole = a if split else b
            self._parts[whole][request.request_id] = _Part(request, request, 0, total)
            self._begin(request, whole)
            return
        first = request
        if split < prompt:
            first = SimRequest(PREFIX + request.request_id, split, 1, request.arrival_s)
        self._links[first.request_id] = _Link(request, a, b, request.output_tokens)
        if split >= prompt:
            request.output_tokens = min(request.output_tokens, split - prompt + 1)
        self._parts[a][request.request_id] = _Part(request, first, 0, split)
        self._parts[b][request.request_id] = _Part(request, request, split, total)
        self._begin(first, a)

    def ended(self, run: SimRequest) -> bool:
        """A run is over; whether its request goes on in the second group."""
        link = self._links.pop(run.request_id, None)
        if link is None:
            for parts in self._parts.values():
                parts.pop(run.request_id, None)
            return False
        request = link.request
        del self._parts[link.a][request.request_id]
        if run is request and run.tokens == link.output_tokens:  # it has ended before the split
            del self._parts[link.b][request.request_id]
            return False
        request.output_tokens = link.output_tokens
        request.computed_tokens = run.prompt_tokens + max(0, request.tokens - 1)
        chunk = min(run.prompt_tokens, self._cluster.shape.options.max_num_batched_tokens)
        last_tokens = 1 if request.tokens > 1 else chunk
        handoff = self._splitting.handoff
        waited_s = handoff.seconds(
            last_tokens if self._splitting.behind else request.computed_tokens
        )
        self.log.waited_s.append(waited_s)
        self._cluster.clock.after(waited_s, self._cluster.add, link.b, request)
        return True

    def _begin(self, run: SimRequest, group: Group) -> None:
        self._cluster.clock.after(
            self._cluster.shape.options.message_s, self._cluster.add, group, run
        )

    def _choose(self, request: SimRequest, expected: int) -> tuple[tuple[Group, Group], int]:
        """The pair that is predicted to finish first, and the split."""
        prompt = request.prompt_tokens
        if self._splitting.where == "prompt":
            self.log.plans.append(Plan(prompt, 0.0, 0.0, 0))
            return self._pairs[len(self.log.plans) % len(self._pairs)], prompt
        terms, plans = self._terms(), []
        for a, b in self._pairs:
            batches = self._batch(a), self._batch(b)
            began_s = time.thread_time()
            plans.append(plan(prompt, expected, *batches, terms))
            self.log.planned_s.append(time.thread_time() - began_s)
        pair, best = min(zip(self._pairs, plans, strict=True), key=lambda found: found[1].finish_s)
        self.log.plans.append(best)
        return pair, best.split

    def _expected(self, request: SimRequest) -> int:
        """Output tokens to plan for, at most what the KV memory of a group holds."""
        shape, hint = self._cluster.shape, self._splitting.hint
        most = (shape.blocks - 1) * min(shape.block_tokens.values()) - request.prompt_tokens
        return expected_outputs(
            self._mean_outputs(), most, None if hint is None else hint(request.output_tokens)
        )

    def _batch(self, group: Group) -> VirtualBatch:
        """All that a group was given and has not done."""
        prefill = pairs = contexts = lefts = 0.0
        sequences, decoding = 0, self._cluster.lanes[group].decoding
        for part in self._parts[group].values():
            decoding.sync(part.run)
            done, prompt = part.done(group), part.request.prompt_tokens
            rest = max(0, min(part.end, prompt) - done)
            prefill += rest
            pairs += rest * (done + rest / 2)
            if part.end > prompt:
                sequences += 1
                contexts += max(done, prompt)
                lefts += max(1, part.end - max(done, prompt))
        count = max(1, sequences)
        return VirtualBatch(prefill, sequences, contexts / count, lefts / count, pairs)
