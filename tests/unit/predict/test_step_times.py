"""LaneSteps: the times of a group's steps, each made in the way that takes less time."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.predict.forecast import forecast
from flying_serving.predict.parallelism import TokenCost
from flying_serving.predict.step_times import LaneSteps
from flying_serving.predict.steps import StepCost
from flying_serving.predict.work import LaneFigures, Work
from tests.unit.policy.snapshots import OBJECTIVE
from tests.unit.predict.token_costs import TENSOR, TOKEN

LEAST, BUDGET = 64, 2048
LANE = LaneFigures(TENSOR, 256, 10**6, BUDGET)
TOKEN_LANE = replace(LANE, cost=TOKEN)
BOTH = replace(LANE, token_cost=TokenCost(TOKEN, 1, LEAST))
RUNNING, PROMPT = st.floats(0.0, 1024.0), st.floats(1.0, 10_000.0)


@given(RUNNING, PROMPT)
def test_each_step_takes_the_time_of_the_shorter_way(running: float, prompt: float) -> None:
    """Steps of fewer tokens than any measured one are tensor parallel."""
    tensor, token, both = (
        LaneSteps.of(lane, prompt, 100.0).times(running) for lane in (LANE, TOKEN_LANE, BOTH)
    )
    tokens = (running, min(prompt, BUDGET) + running, BUDGET + running)
    for count, tensor_s, token_s, found_s in zip(tokens, tensor, token, both, strict=True):
        assert found_s == (min(tensor_s, token_s) if count >= LEAST else tensor_s)


@given(RUNNING, PROMPT)
def test_no_step_is_shorter_than_one_with_less_in_it(running: float, prompt: float) -> None:
    """Also if larger steps alone may be token parallel, and that was fitted to take no time."""
    free = replace(LANE, token_cost=TokenCost(StepCost(0.0, 0.0, 0.0, 0.0), 4, LEAST))
    times = LaneSteps.of(free, prompt, 100.0).times(running)
    assert list(times) == sorted(times)


@given(
    *(st.floats(0.01, 20.0), PROMPT, st.floats(1.0, 500.0), st.floats(0.0, 50.0)),
    st.floats(0.0, 300.0),
)
def test_a_dearer_way_changes_no_forecast(
    rate: float, prompt: float, outputs: float, waiting: float, running: float
) -> None:
    """To the last digit."""
    work = Work(rate, prompt, outputs, waiting, running)
    dear = StepCost(0.1, 1e-3, 1e-3, 1e-6, prefill_pair_s=1e-7)
    either = replace(LANE, token_cost=TokenCost(dear, 1, LEAST))
    assert forecast(LANE, 2, work, OBJECTIVE) == forecast(either, 2, work, OBJECTIVE)
    assert LANE.prompts_s(prompt, waiting) == either.prompts_s(prompt, waiting)
    assert LANE.step_s(prompt, running, 1000.0) == either.step_s(prompt, running, 1000.0)


def test_a_group_that_divides_tokens_has_earlier_first_tokens() -> None:
    """Its steps that only decode stay as they are: the time per token of a lone request too."""
    work = Work(4.0, 3000.0, 100.0, 20.0)
    found, plain = (forecast(lane, 1, work, OBJECTIVE) for lane in (BOTH, LANE))
    assert found.ttft_s < plain.ttft_s
    assert found.request_seconds < plain.request_seconds
    one, other = (LaneSteps.of(lane, 3000.0, 100.0).times(1.0) for lane in (BOTH, LANE))
    assert one.decode_s == pytest.approx(other.decode_s, abs=0)


@given(RUNNING, st.floats(1.0, BUDGET))
def test_times_of_token_parallel_steps_are_what_their_contents_cost(
    running: float, prompt: float
) -> None:
    """Each engine has its share of tokens, and the further cost of the first of them."""
    cost = TokenCost(StepCost(0.0, 4e-5, 1e-4, 0.0, few_token_s=1e-3, some_token_s=1e-4), 4, 0)
    dear = replace(LANE, cost=StepCost(9.0, 9.0, 9.0, 0.0), token_cost=cost)
    times = LaneSteps.of(dear, prompt, 100.0).times(running)
    assert list(times) == pytest.approx(
        [cost.step_s(tokens, running, 0) for tokens in (0, prompt, BUDGET)]
    )
