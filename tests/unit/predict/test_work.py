"""LaneFigures: what prompts cost beside the steps that are made anyway. Work: arrivals to come."""

import math
from dataclasses import replace
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.parallelism import Parallelism
from flying_serving.predict.arrivals import CHANGE_S, LEAST_RATE
from flying_serving.predict.parallelism import TokenCost
from flying_serving.predict.steps import Step, StepCost, StepModel
from flying_serving.predict.work import LaneFigures, Work, step_time
from tests.unit.predict.token_costs import TENSOR, measured

BUDGET = 512
LANE = LaneFigures(StepCost(0.02, 1e-4, 1e-3, 1e-7, prefill_pair_s=1e-8), 256, 10**7, BUDGET)


@given(st.integers(1, 400), st.integers(1, 8))
def test_prompts_are_computed_in_full_steps(steps: int, prompts: int) -> None:
    """The seconds are those of their steps, each with all that was computed of its prompt
    before.
    """
    cost, taken = LANE.cost, range(0, steps * BUDGET, BUDGET)
    alone_s = sum(cost.step_s(BUDGET, 0, 0, BUDGET * before) - cost.fixed_s for before in taken)
    assert LANE.prompts_s(prompts * steps * BUDGET, prompts) == pytest.approx(prompts * alone_s)


@given(st.floats(1, BUDGET), st.integers(1, 8))
def test_prompts_of_one_step_have_no_context(tokens: float, prompts: int) -> None:
    """They are linear in tokens."""
    assert LANE.prompts_s(prompts * tokens, prompts) == pytest.approx(
        prompts * tokens * LANE.cost.prefill_token_s
    )


def test_no_prompt_takes_no_time() -> None:
    """Nor is it divided by how many there are."""
    assert LANE.prompts_s(0, 0) == 0


@given(st.integers(1, 400), st.integers(1, 8))
def test_prompts_are_computed_token_parallel_where_that_is_shorter(
    steps: int, prompts: int
) -> None:
    """In full steps; what they add is counted from the tensor parallel steps made anyway."""
    token = StepCost(0.03, 2e-5, 1e-3, 1e-7, prefill_pair_s=1e-8)
    lane = replace(LANE, token_cost=TokenCost(token, 1, 64))
    taken, fixed_s = range(0, steps * BUDGET, BUDGET), LANE.cost.fixed_s
    alone_s = sum(token.step_s(BUDGET, 0, 0, BUDGET * before) - fixed_s for before in taken)
    assert lane.prompts_s(prompts * steps * BUDGET, prompts) == pytest.approx(prompts * alone_s)
    assert lane.prompts_s(63, 1) == LANE.prompts_s(63, 1)


def test_a_step_takes_the_time_of_the_shorter_way() -> None:
    token = StepCost(0.03, 2e-5, 1e-3, 1e-7)
    lane = replace(LANE, token_cost=TokenCost(token, 1, 64))
    assert lane.step_s(40, 23, 500) == LANE.cost.step_s(40, 23, 500) == LANE.step_s(40, 23, 500)
    assert lane.step_s(400, 24, 500) == token.step_s(400, 24, 500) < LANE.step_s(400, 24, 500)


def test_the_time_of_a_step_is_that_of_the_shorter_measured_way() -> None:
    model = StepModel()
    model.calibrate(Step.measured([*measured(2, {Parallelism.TENSOR: TENSOR}), *measured(4)]))
    of_two, of_four, token = step_time(model, 2), step_time(model, 4), TokenCost.of(model, 4)
    assert token is not None
    assert of_two(2000, 0, 0, 0) == model.cost(2).step_s(2000, 0, 0)
    assert of_four(100, 0, 0, 0) == model.cost(4).step_s(100, 0, 0) < token.step_s(100, 0, 0)
    assert of_four(2000, 0, 0, 0) == token.step_s(2000, 0, 0) < model.cost(4).step_s(2000, 0, 0)
    with pytest.raises(KeyError):
        step_time(model, 8)


@pytest.mark.parametrize(("from_s", "to_s"), [(0.0, 5.0), (10.0, 40.0), (100.0, 101.0)])
def test_arrivals_between_two_times_are_the_mean_of_a_rate_that_decays(
    from_s: float, to_s: float
) -> None:
    """From 9 to the usual 2 per second; a rate below the usual one stays."""
    span_s = (to_s - from_s) / 10_000
    rates = (2.0 + 7.0 * math.exp(-(from_s + (n + 0.5) * span_s) / CHANGE_S) for n in range(10_000))
    found = Work(9.0, 300.0, 60.0, 0.0, usual_rate=2.0).rate_between(from_s, to_s)
    assert found == pytest.approx(mean(rates))
    assert Work(1.5, 300.0, 60.0, 0.0, usual_rate=2.0).rate_between(from_s, to_s) == 1.5


@given(rate=st.floats(0.05, 100.0), error=st.floats(0.0, 200.0))
def test_unlike_work_has_rates_of_one_standard_deviation_less_and_more(
    rate: float, error: float
) -> None:
    work = Work(rate, 300.0, 60.0, 3.0, running=2.0, rate_error=error)
    low, high = work.unlike
    assert LEAST_RATE <= low.rate <= rate <= high.rate == rate + error
    assert low.rate == pytest.approx(max(LEAST_RATE, rate - error))
    assert replace(low, rate=rate) == replace(high, rate=rate) == work
