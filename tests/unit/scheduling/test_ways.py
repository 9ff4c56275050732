"""StepWays: what the engines of a group divide in a step."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.layout.parallelism import Parallelism
from flying_serving.predict.steps import StepCost
from flying_serving.scheduling.ways import StepWays
from flying_serving.wire import CalibrationRow
from tests.unit.predict.token_costs import BOTH, TENSOR, TOKEN, measured

SIZE = 4
WAYS = StepWays([*measured(1), *measured(SIZE)])
FREE = StepCost(1e-6, 0.0, 0.0, 0.0)


@given(st.integers(0, 8192), st.integers(0, 90_000), st.integers(0, 1024), st.integers(1, 2000))
def test_the_chosen_way_is_the_shorter_one(
    prefill_tokens: int, before: int, sequences: int, context: int
) -> None:
    """As exactly as the start's steps are fitted, for any step of 64 tokens or more."""
    contents = prefill_tokens, sequences, before + sequences * context, prefill_tokens * before
    chosen = WAYS.choose(SIZE, *contents)
    assert chosen is WAYS.choose(SIZE, *contents)
    if prefill_tokens + sequences < 64:
        assert chosen is Parallelism.TENSOR
    else:
        least_s = min(cost.step_s(*contents) for cost in BOTH.values())
        assert BOTH[chosen].step_s(*contents) <= 1.01 * least_s


@given(st.integers(64, 8192))
def test_prompts_change_the_way_where_the_costs_cross(tokens: int) -> None:
    crosses = (TOKEN.fixed_s - TENSOR.fixed_s) / (TENSOR.prefill_token_s - TOKEN.prefill_token_s)
    if abs(tokens - crosses) > 0.05 * crosses:
        chosen = WAYS.choose(SIZE, tokens, 0, 0, 0)
        assert chosen is (Parallelism.TOKEN if tokens > crosses else Parallelism.TENSOR)


@pytest.mark.parametrize("measured_way", list(Parallelism))
def test_steps_are_tensor_parallel_unless_both_ways_were_measured(
    measured_way: Parallelism,
) -> None:
    """Nor are they in groups of another size."""
    ways = StepWays(measured(SIZE, {measured_way: FREE}))
    assert ways.choose(SIZE, 8192, 0, 0, 0) is Parallelism.TENSOR
    assert WAYS.choose(2, 8192, 0, 0, 0) is Parallelism.TENSOR
    assert WAYS.choose(1, 8192, 0, 0, 0) is Parallelism.TENSOR
    assert StepWays([]).choose(SIZE, 8192, 0, 0, 0) is Parallelism.TENSOR


def test_steps_smaller_than_any_measured_one_are_tensor_parallel() -> None:
    ways = StepWays(measured(SIZE, {Parallelism.TENSOR: TENSOR, Parallelism.TOKEN: FREE}))
    assert ways.choose(SIZE, 30, 33, 330, 0) is Parallelism.TENSOR
    assert ways.choose(SIZE, 30, 34, 340, 0) is Parallelism.TOKEN


@pytest.mark.parametrize("size", [2, 8])
def test_each_engine_has_two_tokens_of_a_token_parallel_step(size: int) -> None:
    """Even if smaller steps were measured."""
    rows = [
        CalibrationRow(size, seconds, tokens, True, 0, way)
        for tokens in (2, 8, 64)
        for way, seconds in ((Parallelism.TENSOR, 0.01), (Parallelism.TOKEN, 0.001))
    ]
    assert StepWays(rows).choose(size, size, size - 1, 0, 0) is Parallelism.TENSOR
    assert StepWays(rows).choose(size, size, size, 0, 0) is Parallelism.TOKEN


@given(st.integers(0, 200), st.integers(0, 200))
def test_no_step_below_the_least_divides_tokens(prefill_tokens: int, sequences: int) -> None:
    """So nothing is computed for small steps but their tokens."""
    least = WAYS.least_tokens(SIZE)
    if prefill_tokens + sequences < least:
        assert WAYS.choose(SIZE, prefill_tokens, sequences, 0, 0) is Parallelism.TENSOR
    assert least == 64
    assert WAYS.least_tokens(1) == WAYS.least_tokens(2) == math.inf
