"""What a layout would make of the work at hand: request-seconds over a horizon, in closed form.

The unit is the number of requests in the system integrated over time, so half the area is half the mean latency
(Little's law). Seconds before a request's first token weigh more than seconds between later ones.

A group of p engines steps in `fixed + n * (per sequence + share of prefill)` seconds with n requests, so with `rate`
requests per second its steps take `fixed / (1 - used)`, where `used` is the share of time that goes into what every
request adds; and it completes at most `slots / (output_tokens * step(slots))` requests per second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flying_serving.layout.groups import Layout
from flying_serving.policy.steps import StepCost

_MOST_USED = 0.75
"""Queues that would grow without bound have no time to do so within the horizon."""


@dataclass(frozen=True)
class LaneFigures:
    """What one group of a size can do.

    Args:
        cost: seconds of its steps.
        slots: requests at a time.
        kv_tokens: tokens that its pooled KV cache holds.
        budget_tokens: tokens in a step at most.
    """

    cost: StepCost
    slots: int
    kv_tokens: int
    budget_tokens: int


@dataclass(frozen=True)
class Work:
    """Requests to come and requests that wait.

    Args:
        rate: arrivals per second.
        prompt_tokens, output_tokens: mean lengths.
        waiting: requests that no group has yet.
        waiting_tokens: prompt tokens of those.
    """

    rate: float
    prompt_tokens: float
    output_tokens: float
    waiting: float
    waiting_tokens: float

    def part(self, share: float) -> Work:
        """A share of it."""
        return replace(
            self, rate=self.rate * share, waiting=self.waiting * share, waiting_tokens=self.waiting_tokens * share
        )


@dataclass(frozen=True)
class Weights:
    """How to judge.

    Args:
        horizon_s: how far to look ahead.
        ttft_weight: seconds of streaming that one second before the first token counts for.
    """

    horizon_s: float
    ttft_weight: float


@dataclass(frozen=True)
class Outlook:
    """What `groups` equal groups would do with some work. Rates per second, times in seconds."""

    most_per_s: float
    ttft_s: float
    tpot_s: float
    request_seconds: float


def outlook(lane: LaneFigures, groups: int, work: Work, weights: Weights) -> Outlook:
    """The figures of `groups` groups of one size that share `work` evenly."""
    cost, outputs = lane.cost, max(1.0, work.output_tokens)
    context = work.prompt_tokens + outputs / 2
    decode_s = cost.sequence_s + cost.context_token_s * context
    prefill_s = cost.prefill_token_s * work.prompt_tokens
    slots = max(1.0, min(lane.slots, lane.kv_tokens / (work.prompt_tokens + outputs)))
    full_step_s = cost.fixed_s + slots * (decode_s + prefill_s / outputs)
    most = groups * slots / (outputs * full_step_s)
    rate = work.rate / groups
    used = rate * (outputs * decode_s + prefill_s)
    alone_s = cost.fixed_s + decode_s
    tpot = max(alone_s, min(cost.fixed_s / (1 - min(used, _MOST_USED)), full_step_s))
    met = min(1.0, rate * outputs * tpot)
    own_s = cost.fixed_s + prefill_s
    ttft = (met * (tpot / 2 + min(slots, rate * outputs * tpot) * decode_s) + own_s) / (
        1 - min(_MOST_USED, rate * prefill_s)
    )
    backlog, crowd = _backlog(lane, groups, work, slots, most, decode_s)
    crowded_tpot = max(tpot, cost.fixed_s + crowd * decode_s)
    coming = work.rate * weights.horizon_s
    area = backlog + coming * ttft
    streaming = outputs * (work.waiting * crowded_tpot + coming * tpot)
    return Outlook(most, ttft, tpot, weights.ttft_weight * area + streaming + _growth(work, most, weights))


def _backlog(
    lane: LaneFigures, groups: int, work: Work, slots: float, most: float, decode_s: float
) -> tuple[float, float]:
    """Seconds that those who wait now spend before their first token, all together; and requests per group then."""
    waiting = work.waiting
    if waiting <= 0:
        return 0.0, 1.0
    active = min(float(groups), max(1.0, waiting))
    tokens = work.waiting_tokens / waiting
    crowd = min(slots, max(1.0, waiting / groups))
    shared_step_s = (lane.cost.fixed_s + crowd / 2 * decode_s) * min(1.0, tokens / lane.budget_tokens)
    first_s = lane.cost.fixed_s + lane.cost.prefill_token_s * tokens
    each_s = lane.cost.prefill_token_s * tokens + shared_step_s
    at_once = min(waiting, slots * groups)
    late = waiting - at_once
    clears_s = (first_s - each_s) + at_once / active * each_s
    area = at_once * (first_s - each_s) + at_once * (at_once + active) / (2 * active) * each_s
    area += late * clears_s + late * late / (2 * most)
    return area / (1 - min(_MOST_USED, work.rate / most)), crowd


def _growth(work: Work, most: float, weights: Weights) -> float:
    """Requests that come faster than they can leave pile up."""
    return weights.ttft_weight * max(0.0, work.rate - most) * weights.horizon_s**2 / 2


def judge(layout: Layout, lanes: Mapping[int, LaneFigures], work: Work, weights: Weights) -> float:
    """Request-seconds if new work went to this layout from now on.

    In a mixed layout the work is shared in proportion to what groups can do, or goes to the groups of one size alone,
    whichever is better.
    """
    counts = Counter(len(group) for group in layout.groups)
    if len(counts) == 1:
        ((size, count),) = counts.items()
        return outlook(lanes[size], count, work, weights).request_seconds
    alone = {size: outlook(lanes[size], count, work, weights) for size, count in counts.items()}
    total = sum(figures.most_per_s for figures in alone.values())
    shared = sum(
        outlook(lanes[size], count, work.part(alone[size].most_per_s / total), weights).request_seconds
        for size, count in counts.items()
    )
    return min(shared, *(figures.request_seconds for figures in alone.values()))
