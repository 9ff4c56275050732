"""The split of a request over two groups of one size: DynaServe's global planner (its section 4.1,
algorithm 1).

A request of P prompt tokens and D expected output tokens may be split at any token s of P + D.
Group A computes the first s tokens, group B the rest.

- At s = 0 all of it is left to B.
- At s = P it is disaggregated serving.
- At s = P + D all of it is left to A.

The planner looks for the s at which both groups are predicted to finish their work at the same
time.

The paper simulates virtual batches pass by pass. Here they have a closed form. The work of a batch
does not depend on its order, and each of its passes costs a fixed time as well.

A batch has one block of tokens of each request that decodes. An output takes its time beside any
other work, so the end of the last one says how long outputs are. It does not say which group has
more to do, and prompts would wait for as long.

While a request runs, its length may turn out otherwise than planned. Then it is planned again: the
rest of it goes on where it is, or in another group (`is_better_elsewhere`). The plan at its arrival
takes at most four probes, and leaves two for that, so no request costs more than MOST_PROBES.
"""

import math
from dataclasses import dataclass

from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.work import LaneFigures

MOST_PROBES = 6
"""Number of splits that are tried for a request in its life."""
PROBES_AGAIN = 2
"""Of these, the probes that are kept to plan a request again: it stays, and it moves."""
DEVIATION = 0.25
"""Share of the planned length by which the expected one differs before a split that is ahead is
planned again.
"""
TOLERANCE = 0.02
"""Finish times that differ by this share of the later one are equal."""
SHORTEST_SHARE = 0.1
"""Share of a pass's fixed time that passes have for their contents at least, where the target is
shorter.
"""


@dataclass(frozen=True)
class VirtualBatch:
    """The work that a group has to do now.

    `prefill_tokens`: prompt tokens to compute, `prefill_pairs`: these times the tokens of their
    requests before them. `sequences`: requests that decode here, or will once their KV is here.
    `context_tokens`, `tokens_left`: of these requests, mean tokens so far and mean expected tokens
    to go.
    """

    prefill_tokens: float = 0.0
    sequences: float = 0.0
    context_tokens: float = 0.0
    tokens_left: float = 0.0
    prefill_pairs: float = 0.0

    def with_prompt(self, tokens: float, before: float) -> "VirtualBatch":
        """Return the batch with `tokens` of one more prompt, after `before` ones that another group
        computes.
        """
        pairs = self.prefill_pairs + tokens * (before + tokens / 2)
        return VirtualBatch(
            self.prefill_tokens + tokens,
            self.sequences,
            self.context_tokens,
            self.tokens_left,
            pairs,
        )

    def with_sequence(
        self, context_tokens: float, tokens_left: float, share: float = 1.0
    ) -> "VirtualBatch":
        """Return the batch with one more request that decodes, which is here for a share of its
        life.
        """
        if tokens_left <= 0 or share <= 0:
            return self
        count = self.sequences + share
        context = (self.sequences * self.context_tokens + share * context_tokens) / count
        left = (self.sequences * self.tokens_left + share * tokens_left) / count
        return VirtualBatch(self.prefill_tokens, count, context, left, self.prefill_pairs)


@dataclass(frozen=True)
class SplitCosts:
    """The costs that are the same for all requests: of steps in both groups, and of a handoff.

    `handoff`: of KV that is pulled behind the computation, so that a request waits only for the
    last chunk. `block_tokens`: in one KV block. `target_s`: for the time between two tokens, which
    bounds the steps of a group that decodes; infinite without one.
    """

    lane: LaneFigures
    handoff: MigrationCost
    block_tokens: int
    target_s: float = math.inf

    def finish_s(self, batch: VirtualBatch) -> float:
        """Return the seconds until a virtual batch is done: all prompts, and one block of tokens of
        each request that decodes.
        """
        lane, cost, each = (
            self.lane,
            self.lane.cost,
            min(batch.tokens_left, float(self.block_tokens)),
        )
        work_s = (
            cost.prefill_token_s * batch.prefill_tokens
            + cost.prefill_pair_s * batch.prefill_pairs
            + (cost.sequence_s + cost.context_token_s * batch.context_tokens)
            * batch.sequences
            * each
        )
        passes = batch.prefill_tokens / lane.max_num_batched_tokens
        if batch.sequences:
            room_s = max(SHORTEST_SHARE * cost.fixed_s, self.target_s - cost.fixed_s)
            # requests for which there is no room wait until as many others have ended
            held = batch.sequences * (batch.context_tokens + batch.tokens_left) / lane.kv_tokens
            over = max(held, batch.sequences / lane.max_num_seqs) - 1.0
            passes = max(
                passes, each + max(0.0, over) * batch.tokens_left, work_s / max(room_s, 1e-9)
            )
        few_s = cost.first_tokens_s(max(batch.sequences, batch.prefill_tokens))
        return work_s + passes * (cost.fixed_s + few_s)

    def handoff_s(self, split: int, prompt_tokens: int) -> float:
        """Return the seconds that a request waits for its KV at a split: the last chunk is one
        token while it decodes.
        """
        chunk = min(split, self.lane.max_num_batched_tokens) if split <= prompt_tokens else 1
        return self.handoff.seconds(chunk)


@dataclass(frozen=True)
class Plan:
    """The point at which a request is split.

    `split`: its token, 0 if all of it goes to B, its whole length if all goes to A. `finish_s`:
    predicted seconds until both groups have finished, `whole_s`: if it is not split. `probes`:
    splits that were tried.
    """

    split: int
    finish_s: float
    whole_s: float
    probes: int


def plan(
    prompt_tokens: int, output_tokens: int, a: VirtualBatch, b: VirtualBatch, costs: SplitCosts
) -> Plan:
    """Plan the split of a request, to be sent to A and B now.

    Starts at the prompt's end and at both ends of the request, then tries the token where a line
    between two of these has equal finish times. A split has to gain more than its handoff costs and
    more than TOLERANCE. No split makes a request come sooner than on an idle group: below that load
    requests stay whole.

    Args:
        prompt_tokens, output_tokens: of the request, the latter as expected; both at least 1.
        a, b: the work of the two groups.
        costs: the costs of steps and handoffs.
    """
    search = _Search(prompt_tokens, output_tokens, a, b, costs)
    total = prompt_tokens + output_tokens
    start, low, high = search.probe(prompt_tokens), search.probe(0), search.probe(total)
    whole = min(low, high, key=lambda one: one.last_s)
    below, above = (low, start) if start.excess_s > 0 else (start, high)
    best = start
    # otherwise one group finishes last wherever the request is split
    if not start.equal and below.excess_s < 0 < above.excess_s:
        share = below.excess_s / (below.excess_s - above.excess_s)
        middle = search.probe(search.snap(below.split + share * (above.split - below.split)))
        best = min(start, middle, key=lambda one: one.last_s)
    alone_s = search.alone_s
    whole_s, finish_s = max(alone_s, whole.last_s), max(alone_s, best.last_s)
    least_s = max(costs.handoff_s(best.split, prompt_tokens), TOLERANCE * whole_s)
    gains = 0 < best.split < total and whole_s - finish_s > least_s
    return Plan(
        best.split if gains else whole.split, finish_s if gains else whole_s, whole_s, search.probes
    )


@dataclass(frozen=True)
class PlannedLength:
    """The length that a request was planned for.

    `output_tokens`: its expected length. `probes`: splits that were tried for it. `is_revised`:
    True if it was planned again while it ran.
    """

    output_tokens: int
    probes: int = 0
    is_revised: bool = False

    @property
    def may_change(self) -> bool:
        """True if enough probes are left to plan it again."""
        return self.probes + PROBES_AGAIN <= MOST_PROBES

    def differs_from(self, output_tokens: float) -> bool:
        """Return whether an expected length is another one than planned."""
        return abs(output_tokens - self.output_tokens) > DEVIATION * self.output_tokens

    def again(self, output_tokens: int) -> "PlannedLength":
        """Return what it is planned for the next time."""
        return PlannedLength(output_tokens, self.probes + PROBES_AGAIN, is_revised=True)


@dataclass(frozen=True)
class Rest:
    """The rest of a request that decodes.

    `context_tokens`: of prompt and output, that it has. `tokens_left`: outputs that it is expected
    to get yet.
    """

    context_tokens: int
    tokens_left: float


def is_better_elsewhere(
    rest: Rest, here: VirtualBatch, there: VirtualBatch, costs: SplitCosts
) -> bool:
    """Return whether the rest of a request should be computed there, and not here.

    Both groups then have to finish sooner, by more than the pull of its whole KV takes and by more
    than TOLERANCE. Takes PROBES_AGAIN probes.

    Args:
        rest: of the request.
        here, there: the work of both groups, without this request.
        costs: the costs of steps and handoffs.
    """
    has_rest_here = here.with_sequence(rest.context_tokens, rest.tokens_left)
    has_rest_there = there.with_sequence(rest.context_tokens, rest.tokens_left)
    stay_s = max(costs.finish_s(has_rest_here), costs.finish_s(there))
    move_s = max(costs.finish_s(here), costs.finish_s(has_rest_there))
    least_s = max(costs.handoff.seconds(rest.context_tokens), TOLERANCE * stay_s)
    return stay_s - move_s > least_s


@dataclass(frozen=True)
class _Probe:
    """One split that was tried, and when both groups would finish."""

    split: int
    a_s: float
    b_s: float

    @property
    def last_s(self) -> float:
        return max(self.a_s, self.b_s)

    @property
    def excess_s(self) -> float:
        """Seconds by which A finishes later than B; grows with the split."""
        return self.a_s - self.b_s

    @property
    def equal(self) -> bool:
        return abs(self.excess_s) <= TOLERANCE * self.last_s


class _Search:
    """The splits of one request that are tried; `probes` counts them."""

    def __init__(
        self,
        prompt_tokens: int,
        output_tokens: int,
        a: VirtualBatch,
        b: VirtualBatch,
        costs: SplitCosts,
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        self._a, self._b, self._costs = a, b, costs
        self.probes = 0

    def snap(self, split: float) -> int:
        """Return a token of the request near `split`: inside the prompt the nearest edge of a
        block.
        """
        block = self._costs.block_tokens
        if split < self._prompt_tokens:
            return min(self._prompt_tokens, block * round(split / block))
        return round(split)

    def probe(self, split: int) -> _Probe:
        """Predict when both groups finish if the request is split here."""
        self.probes += 1
        prompt = self._prompt_tokens
        of_a, early = min(split, prompt), max(0, split - prompt)
        a = self._a.with_prompt(of_a, 0) if of_a else self._a
        b = self._b.with_prompt(prompt - of_a, of_a) if of_a < prompt else self._b
        outputs, rest = self._output_tokens, self._output_tokens - early
        a, b = (
            a.with_sequence(prompt, early, early / outputs),
            b.with_sequence(prompt + early, rest, rest / outputs),
        )
        return _Probe(split, self._costs.finish_s(a), self._costs.finish_s(b))

    @property
    def alone_s(self) -> float:
        """Seconds that the request takes on an idle group."""
        alone = VirtualBatch().with_prompt(self._prompt_tokens, 0)
        prompt_s = self._costs.finish_s(alone)
        return prompt_s + self._costs.finish_s(
            VirtualBatch().with_sequence(self._prompt_tokens, self._output_tokens)
        )
