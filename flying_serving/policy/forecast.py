"""What a layout would make of the work at hand: request-seconds over a horizon, in closed form.

The unit is the number of requests in the system integrated over time: divided by the requests it is the mean latency
(Little's law). Seconds before a request's first token weigh more than seconds between later ones.

A group of p engines steps in `fixed + prompts + n * decode` seconds with n requests. First tokens come as fast as full
steps get prompts done, while slots are free; in the long run as fast as requests leave. With few requests a step takes
`fixed / (1 - used)`, where `used` is the share of time that goes into what every request adds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flying_serving.layout.groups import Layout
from flying_serving.policy.steps import StepCost

_MOST_USED = 0.85
"""What would grow without bound has no time to do so within the horizon."""
_SPREAD = 0.65
"""(1 + c^2) / 2 for lengths whose standard deviation is c = 0.55 of their mean: how much longer a queue gets for it."""


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
        running: requests that some group has, in this layout or another.
    """

    rate: float
    prompt_tokens: float
    output_tokens: float
    waiting: float
    waiting_tokens: float
    running: float = 0.0

    def part(self, share: float) -> Work:
        """A share of it."""
        return replace(
            self,
            rate=self.rate * share,
            waiting=self.waiting * share,
            waiting_tokens=self.waiting_tokens * share,
            running=self.running * share,
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
    """What `groups` equal groups would do with some work. Rates per second, times in seconds.

    `first_per_s`: first tokens while there is a queue; `most_per_s`: requests that can leave in the long run.
    """

    first_per_s: float
    most_per_s: float
    ttft_s: float
    tpot_s: float
    request_seconds: float


def outlook(lane: LaneFigures, groups: int, work: Work, weights: Weights) -> Outlook:
    """The figures of `groups` groups of one size that share `work` evenly."""
    cost, outputs, horizon_s = lane.cost, max(1.0, work.output_tokens), weights.horizon_s
    decode_s = cost.sequence_s + cost.context_token_s * (work.prompt_tokens + outputs / 2)
    prefill_s = cost.prefill_token_s * work.prompt_tokens
    slots = max(1.0, min(lane.slots, lane.kv_tokens / (work.prompt_tokens + outputs)))
    rate = work.rate / groups
    crowd = min(slots, max(1.0, (work.running + work.waiting) / groups))
    full_step_s = cost.fixed_s + slots * (decode_s + prefill_s / outputs)
    most = groups * slots / (outputs * full_step_s)
    prompts = max(1.0, lane.budget_tokens / work.prompt_tokens)
    first = groups * prompts / (cost.fixed_s + prompts * prefill_s + crowd * decode_s)
    room = slots * groups - work.running - work.waiting
    filled_s = room / max(work.rate, 1e-9)
    through = first if filled_s > horizon_s else min(first, most + max(0.0, room) / horizon_s)
    used = min(_MOST_USED, rate * (outputs * decode_s + prefill_s))
    tpot = max(cost.fixed_s + decode_s, min(cost.fixed_s / (1 - used), full_step_s))
    met = min(1.0, rate * outputs * tpot)
    own_s = cost.fixed_s + prefill_s
    ttft = (met * (tpot / 2 + min(slots, rate * outputs * tpot) * decode_s) + own_s) * _crowding(
        min(_MOST_USED, rate * prefill_s), groups
    )
    coming = work.rate * horizon_s
    area = _queue_area(work, through, horizon_s, min(float(groups), max(1.0, work.waiting))) + coming * ttft
    streaming = outputs * (work.waiting * max(tpot, cost.fixed_s + crowd * decode_s) + coming * tpot)
    return Outlook(first, most, ttft, tpot, weights.ttft_weight * area + streaming)


def _crowding(used: float, groups: int) -> float:
    """By how much requests that come at random delay each other's prompts, where the least loaded group gets the next.

    The mean wait of a queue with several servers, as Sakasegawa approximates it ("An approximation formula
    L_q = alpha * rho^beta / (1 - rho)", 1977), for service times that are less random than exponential ones.

    Args:
        used: share of time that prompts take, below 1.
        groups: servers of the queue.
    """
    return 1 + _SPREAD * used ** (math.sqrt(2 * (groups + 1)) - 1) / (groups * (1 - used))


def _queue_area(work: Work, through: float, horizon_s: float, at_once: float) -> float:
    """Request-seconds of a queue that gets `work.rate` and loses `through` requests per second, until it is gone.

    Requests come until the horizon; what is left then is worked off without any more, so that a layout that is slow to
    do it does not look cheap.

    Args:
        at_once: requests that are served at the same time, so that none of them waits for another.
    """
    spare = through - work.rate
    queued = max(0.0, work.waiting - at_once)
    served = work.waiting / through * at_once
    left = queued - spare * horizon_s
    if left > 0:
        return (queued + left) * horizon_s / 2 + left**2 / (2 * through) + served
    return queued**2 / (2 * spare) + served


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
    total = sum(figures.first_per_s for figures in alone.values())
    shared = sum(
        outlook(lanes[size], count, work.part(alone[size].first_per_s / total), weights).request_seconds
        for size, count in counts.items()
    )
    return min(shared, *(figures.request_seconds for figures in alone.values()))


def capacity(layout: Layout, lanes: Mapping[int, LaneFigures], work: Work, weights: Weights) -> float:
    """First tokens per second of a layout while requests queue."""
    counts = Counter(len(group) for group in layout.groups)
    return sum(outlook(lanes[size], count, work, weights).first_per_s for size, count in counts.items())
