"""The fluid model, term by term: what a span and the rest after it add, by hand."""

import math

import pytest

from flying_serving.predict.forecast import forecast
from flying_serving.predict.rollout import LENGTHS_CV, MAX_UTILIZATION, FluidModel, GroupState
from flying_serving.predict.steps import StepCost
from flying_serving.predict.work import NO_INTERFERENCE, Interference, LaneFigures, Objective, Work
from tests.unit.policy.snapshots import OBJECTIVE

STEP_S, PROMPT, OUTPUT, BUDGET = 0.1, 512.0, 40.0, 256
HALF_S = STEP_S * OUTPUT / 2
"""Seconds of half an output: 2."""


def model(most_requests: int = 64, groups: int = 1, token_s: float = 0.0) -> FluidModel:
    """Return a group whose steps take STEP_S, whatever is in them but prompts; a prompt takes
    two.
    """
    lane = LaneFigures(StepCost(STEP_S, token_s, 0.0, 0.0), most_requests, 10**6, BUDGET)
    return FluidModel.of(lane, groups, Work(1.0, PROMPT, OUTPUT, 0.0), OBJECTIVE, NO_INTERFERENCE)


def after(requests: float, inflow: float, span_s: float) -> float:
    """Return what is left in half an output, into which `inflow` requests come evenly: in many
    short times.
    """
    parts = 20_000
    for _ in range(parts):
        requests += inflow / parts - requests * span_s / parts / HALF_S
    return requests


@pytest.mark.parametrize(
    ("queue", "first", "second", "rate", "limit"),
    [
        (1.0, 3.0, 2.0, 0.5, "arrived"),
        (30.0, 3.0, 2.0, 2.0, "prompts"),
        (9.0, 5.0, 2.0, 1.0, "room"),
    ],
)
def test_a_span_takes_requests_on_and_adds_their_seconds(
    queue: float, first: float, second: float, rate: float, limit: str
) -> None:
    """From the queue into the first half of their outputs, into the second, and out. As many are
    admitted as are there, as full steps compute, or as find room: what is free, and half of those
    that reach the end of a stage.
    """
    span_s, crowding = 1.5, 1.25
    group = model(8 if limit == "room" else 64)
    reach = (first + second) * (1 - math.exp(-span_s / HALF_S))
    admitted = {
        "arrived": queue + rate * span_s,
        "prompts": span_s / STEP_S / 2,
        "room": 8 - (first + second) + reach / 2,
    }[limit]
    state = GroupState(4.0, queue, first, second)
    group.step(state, span_s, rate, crowding)
    first_half = after(first, admitted, span_s)
    halfway = first + admitted - first_half
    second_half = after(second, halfway, span_s)
    ended = second + halfway - second_half
    left = queue + rate * span_s - admitted
    assert state.now_s == 5.5
    assert state.admitted == pytest.approx(admitted)
    assert state.queue == pytest.approx(left, abs=1e-12)
    assert state.first_half == pytest.approx(first_half, rel=1e-3)
    assert state.second_half == pytest.approx(second_half, rel=1e-3)
    assert state.lives == pytest.approx((halfway + ended) / 2, rel=1e-3)
    assert state.queued_s == pytest.approx(span_s * (queue + left) / 2)
    assert state.first_s == pytest.approx(admitted * crowding * (STEP_S / 2 + 2 * STEP_S))
    assert state.streamed_s == pytest.approx((halfway + ended) * HALF_S, rel=1e-3)


def test_a_request_waits_for_a_part_of_a_step_if_less_than_one_runs() -> None:
    state = GroupState(0.0, 1.0, 0.1, 0.3)
    model().step(state, 1.0, 0.0, 1.0)
    assert state.first_s == pytest.approx(0.4 * STEP_S / 2 + 2 * STEP_S)


@pytest.mark.parametrize(
    ("most_requests", "per_s"), [(64, 1 / (2 * STEP_S)), (8, 8 / (OUTPUT * STEP_S))]
)
def test_the_rest_is_worked_off_as_fast_as_prompts_or_outputs_allow(
    most_requests: int, per_s: float
) -> None:
    """The queue shrinks evenly. Of an output in its second half, a half is left."""
    state = GroupState(0.0, 12.0, 3.0, 2.0, queued_s=1.0, first_s=2.0, streamed_s=3.0)
    model(most_requests).finish(state)
    assert state.queued_s == pytest.approx(1.0 + 12.0 * (12.0 / per_s) / 2)
    assert state.first_s == pytest.approx(2.0 + 12.0 * 2 * STEP_S)
    assert state.streamed_s == pytest.approx(3.0 + (12.0 + 3.0 + 2.0 / 2) * OUTPUT * STEP_S)


@pytest.mark.parametrize(("rate", "used"), [(0.0, 0.0), (0.5, 0.256), (9.0, MAX_UTILIZATION)])
def test_prompts_delay_each_other_as_in_a_queue(rate: float, used: float) -> None:
    """For one group by the formula of Pollaczek and Khinchine; four share what comes to them."""
    alone, shared = (model(groups=groups, token_s=1e-3).crowding(rate) for groups in (1, 4))
    variation = (1 + LENGTHS_CV**2) / 2
    assert alone == pytest.approx(1 + variation * used / (1 - used))
    assert shared == pytest.approx(1 + variation * used ** (math.sqrt(10) - 1) / (1 - used) / 4)


def test_requests_that_arrive_while_a_group_is_blocked_wait_half_of_it() -> None:
    """On average: they arrive evenly. All of them, and those that were there, begin then."""
    blocked_s, rest_s = 20.0, 20.0
    lane = LaneFigures(StepCost(STEP_S, 0.0, 0.0, 0.0), 64, 10**6, BUDGET)
    blocked = Interference(blocked_s=blocked_s)
    found = forecast(lane, 1, Work(2.0, 1.0, OUTPUT, 6.0), Objective(blocked_s + rest_s), blocked)
    later = forecast(lane, 1, Work(2.0, 1.0, OUTPUT, 6.0 + 2.0 * blocked_s), Objective(rest_s))
    waited_s = 6.0 * blocked_s + 2.0 * blocked_s * blocked_s / 2
    assert found.request_seconds == pytest.approx(waited_s + later.request_seconds, rel=0.01)
