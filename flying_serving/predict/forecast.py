"""What a layout would make of the work at hand: request-seconds, by rolling it out.

The unit is the number of requests in the system integrated over time: divided by the requests it is the mean latency
(Little's law). Seconds before a request's first token weigh more than seconds between later ones.

Requests come until the horizon; what is left then is worked off, so that a layout that is slow to do it does not look
cheap. Equal groups share the work evenly, so one of them is rolled out for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from flying_serving.layout.groups import Layout
from flying_serving.predict.rollout import FluidModel
from flying_serving.predict.work import FREE, Interference, LaneFigures, Weights, Work

_GRID = tuple(part / 32 for part in (1, 2, 4, 8, 16, 24, 32))
"""Ends of spans of time, as shares of the horizon: short at first, while a queue is worked off."""
_AFTER = (0.5, 1.0)
"""And those after it, while nothing comes any more."""
_LEAST_RATE = 1e-6
"""Some request comes, so that there are means over requests."""
_CALM = 0.5
"""While no more requests come than this share of what the widest groups can take, they may get all of them."""


@dataclass(frozen=True)
class Forecast:
    """What `groups` equal groups would do with some work: mean times in seconds, and request-seconds in all."""

    ttft_s: float
    tpot_s: float
    request_seconds: float


def outlook(
    lane: LaneFigures, groups: int, work: Work, weights: Weights, interference: Interference = FREE
) -> Forecast:
    """The figures of `groups` groups of one size that share `work` evenly."""
    flow = FluidModel.of(lane, groups, work, interference)
    horizon_s, blocked_s = weights.horizon_s, interference.blocked_s
    running = min(flow.most, work.running / groups)
    queue = (work.prompts + work.running) / groups - running
    left_s = max(0.01 * horizon_s, horizon_s - blocked_s)
    ends = [blocked_s, *(blocked_s + part * left_s for part in _GRID)]
    spans = [(to - at, max(_LEAST_RATE, work.rate_in(at, to)) / groups) for at, to in pairwise(ends)]
    spans += [(part * horizon_s, 0.0) for part in _AFTER]
    rate = work.rate_in(0.0, blocked_s) / groups if blocked_s else 0.0
    rolled = flow.roll(spans, blocked_s, queue + rate * blocked_s, running)
    waited_s = rolled.queued_s + (queue + rate * blocked_s / 2) * blocked_s
    area = weights.ttft_weight * (waited_s + rolled.first_s) + rolled.streamed_s
    return Forecast(rolled.ttft_s, rolled.tpot_s, groups * area)


def first_per_s(lane: LaneFigures, groups: int, work: Work) -> float:
    """First tokens per second of `groups` groups of one size while there is a queue."""
    flow = FluidModel.of(lane, groups, work, FREE)
    _, _, full_s = flow.times(min(flow.most, max(1.0, (work.running + work.prompts) / groups)))
    return groups * flow.budget / (flow.prompt * full_s)


def judge(
    layout: Layout, lanes: Mapping[int, LaneFigures], work: Work, weights: Weights, interference: Interference = FREE
) -> float:
    """Request-seconds if new work went to this layout from now on, and what runs were there already.

    In a mixed layout the work is shared in proportion to what groups can do, or goes to its widest groups alone while
    there is little of it.
    """
    counts = Counter(map(len, layout.groups))
    if len(counts) == 1:
        ((size, count),) = counts.items()
        return outlook(lanes[size], count, work, weights, interference).request_seconds
    first = {size: first_per_s(lanes[size], count, work) for size, count in counts.items()}
    total = sum(first.values())
    judged = sum(
        outlook(lanes[size], count, work.part(first[size] / total), weights, interference).request_seconds
        for size, count in counts.items()
    )
    widest = max(counts)
    if work.rate < _CALM * first[widest]:
        judged = min(judged, outlook(lanes[widest], counts[widest], work, weights, interference).request_seconds)
    return judged


def capacity(layout: Layout, lanes: Mapping[int, LaneFigures], work: Work) -> float:
    """First tokens per second of a layout while requests queue."""
    return sum(first_per_s(lanes[size], count, work) for size, count in Counter(map(len, layout.groups)).items())
