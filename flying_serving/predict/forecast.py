"""Forecast of a layout with the work at hand, in request-seconds.

The unit is the number of requests in the system integrated over time. Divided by the requests it is
the mean end-to-end latency (Little's law). Requests arrive until the horizon. The rest is worked
off then, so that a layout that is slow to do it does not look cheap. Equal groups share the work
evenly, so one of them stands for all.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from flying_serving.layout.groups import Layout
from flying_serving.predict.rollout import FluidModel, GroupState
from flying_serving.predict.work import NO_INTERFERENCE, Interference, LaneFigures, Objective, Work

_GRID = tuple(part / 32 for part in (1, 2, 4, 8, 16, 24, 32))
"""Ends of spans of time, as shares of the horizon: short at first, while a queue is worked off."""
_AFTER = (0.5, 1.0)
"""Ends of the spans after the horizon, while nothing arrives any more."""
_LEAST_RATE = 1e-6
"""Requests per second that arrive at least, so that there are means over requests."""


@dataclass(frozen=True)
class Forecast:
    """Forecast of equal groups, or of a layout, with some work: mean times in seconds, and the cost
    of `Objective`.

    `ttft_s` begins when a request leaves the queue, `wait_s` when it arrives.
    """

    ttft_s: float
    tpot_s: float
    request_seconds: float
    wait_s: float


def forecast(
    lane: LaneFigures,
    groups: int,
    work: Work,
    objective: Objective,
    interference: Interference = NO_INTERFERENCE,
) -> Forecast:
    """Forecast `groups` groups of one size that share `work` evenly."""
    model = FluidModel.of(lane, groups, work, objective, interference)
    horizon_s, blocked_s = objective.horizon_s, interference.blocked_s
    running = min(model.max_running, work.running / groups)
    queue = (work.prompts + work.running) / groups - running
    left_s = max(0.01 * horizon_s, horizon_s - blocked_s)
    arrived = work.rate_between(0.0, blocked_s) / groups * blocked_s if blocked_s else 0.0
    state = GroupState(blocked_s, queue + arrived, running / 2, running / 2)
    state.blocked, state.queued_s = state.queue, (queue + arrived / 2) * blocked_s
    crowding = model.crowding(work.rate_between(blocked_s, blocked_s + left_s) / groups)
    ends = [blocked_s, *(blocked_s + part * left_s for part in _GRID)]
    for begin, end in pairwise(ends):
        model.step(
            state, end - begin, max(_LEAST_RATE, work.rate_between(begin, end)) / groups, crowding
        )
    for part in _AFTER:
        model.step(state, part * horizon_s, 0.0, 1.0)
    ttft_s, tpot_s = (
        state.first_s / state.admitted,
        state.streamed_s / (state.lives * model.output_tokens),
    )
    model.finish(state)
    latency_s = objective.urgency * (state.queued_s + state.first_s) + state.streamed_s
    wait_s = (state.queued_s + state.first_s) / (state.admitted + state.queue)
    return Forecast(ttft_s, tpot_s, groups * (latency_s + horizon_s * state.missed), wait_s)


def first_per_s(lane: LaneFigures, groups: int, work: Work) -> float:
    """Return the first tokens per second of `groups` groups of one size while there is a queue."""
    model = FluidModel.of(lane, groups, work, Objective(math.inf), NO_INTERFERENCE)
    running = min(model.max_running, max(1.0, (work.running + work.prompts) / groups))
    full_s = model.steps.times(running).full_s
    return groups * lane.max_num_batched_tokens / (work.prompt_tokens * full_s)


def evaluate(
    layout: Layout,
    lanes: Mapping[int, LaneFigures],
    work: Work,
    objective: Objective,
    interference: Interference = NO_INTERFERENCE,
) -> float:
    """Return the request-seconds of `assess`."""
    return assess(layout, lanes, work, objective, interference).request_seconds


def assess(
    layout: Layout,
    lanes: Mapping[int, LaneFigures],
    work: Work,
    objective: Objective,
    interference: Interference = NO_INTERFERENCE,
) -> Forecast:
    """Forecast a layout to which new work goes from now on, beside its running requests.

    The groups of a mixed layout share the work in proportion to their capacity, or the widest ones
    get all of it.
    """
    counts = Counter(map(len, layout.groups))
    widest = max(counts)
    in_widest = forecast(lanes[widest], counts[widest], work, objective, interference)
    if len(counts) == 1:
        return in_widest

    first = {size: first_per_s(lanes[size], count, work) for size, count in counts.items()}
    shares = {size: per_s / sum(first.values()) for size, per_s in first.items()}
    parts = {
        size: forecast(lanes[size], count, work.part(shares[size]), objective, interference)
        for size, count in counts.items()
    }
    shared = Forecast(
        ttft_s=sum(shares[size] * part.ttft_s for size, part in parts.items()),
        tpot_s=sum(shares[size] * part.tpot_s for size, part in parts.items()),
        request_seconds=sum(part.request_seconds for part in parts.values()),
        wait_s=sum(shares[size] * part.wait_s for size, part in parts.items()),
    )
    return min(shared, in_widest, key=attrgetter("request_seconds", "wait_s"))


def capacity(layout: Layout, lanes: Mapping[int, LaneFigures], work: Work) -> float:
    """Return the first tokens per second of a layout while requests queue."""
    return sum(
        first_per_s(lanes[size], count, work)
        for size, count in Counter(map(len, layout.groups)).items()
    )
