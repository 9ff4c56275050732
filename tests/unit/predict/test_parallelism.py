"""TokenCost: what token parallel steps of a group cost. ParallelismChoice: which steps are such."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from flying_serving.parallelism import Parallelism
from flying_serving.predict.parallelism import ParallelismChoice, TokenCost
from flying_serving.predict.steps import Step, StepCost, StepModel
from flying_serving.wire import CalibrationRow
from tests.unit.predict.token_costs import BOTH, TENSOR, TOKEN, measured

SIZE = 4
CHOICE = ParallelismChoice([*measured(1), *measured(SIZE)])
FREE = StepCost(1e-6, 0.0, 0.0, 0.0)


def test_the_cost_is_of_steps_from_the_least_measured_one_on() -> None:
    model = StepModel()
    model.calibrate(Step.measured(measured(4)))
    found = TokenCost.of(model, 4)
    assert found is not None
    assert found.least_tokens == 64
    assert found.step_s(30, 33, 10**6) == math.inf
    contents = 1000, 64, 70_000, 10**6
    assert found.step_s(*contents) == found.cost.step_s(250, 16, 70_000, 10**6)
    assert found.step_s(*contents) == pytest.approx(TOKEN.step_s(*contents), rel=0.01)
    assert model.cost(4).step_s(*contents) == pytest.approx(TENSOR.step_s(*contents), rel=0.01)


def test_a_group_without_a_measured_token_parallel_step_has_no_such_cost() -> None:
    """A token parallel step of another size says nothing."""
    model = StepModel()
    model.calibrate(Step.measured(measured(2, {Parallelism.TENSOR: TENSOR})))
    model.calibrate(Step.measured(measured(4)))
    assert TokenCost.of(model, 2) is None
    assert TokenCost.of(model, 4) is not None


def test_token_parallel_steps_are_learned_apart_while_serving() -> None:
    """Tensor parallel ones do not get twice as long with them."""
    model = StepModel()
    model.calibrate(Step.measured(measured(4)))
    for tokens in range(1000, 4000, 10):
        model.observe(Step(4, 2 * TOKEN.step_s(tokens, 0, 0), tokens, 0, 0, 0, Parallelism.TOKEN))
    found = TokenCost.of(model, 4)
    assert found is not None
    assert found.step_s(2000, 0, 0) == pytest.approx(2 * TOKEN.step_s(2000, 0, 0), rel=0.1)
    assert model.cost(4).step_s(64, 0, 0) == pytest.approx(TENSOR.step_s(64, 0, 0), rel=0.1)


def test_first_tokens_cost_more_in_each_engine() -> None:
    """As experts do: each engine reads those that its share of the tokens needs."""
    share = StepCost(0.01, 1e-5, 2e-5, 0.0, few_token_s=2e-4, some_token_s=1e-4)
    rows = [
        CalibrationRow(
            8,
            share.step_s(tokens / 8, 0, 0) if is_prefill else share.step_s(0, tokens / 8, 0),
            tokens,
            is_prefill,
            0,
            Parallelism.TOKEN,
        )
        for tokens in (64, 128, 256, 1024, 4096)
        for is_prefill in (True, False)
    ]
    model = StepModel()
    model.calibrate(Step.measured(rows))
    found = TokenCost.of(model, 8)
    assert found is not None
    for tokens in (64, 200, 500, 2000, 8192):
        assert found.step_s(tokens, 0, 0) == pytest.approx(share.step_s(tokens / 8, 0, 0), rel=0.01)
    assert found.first_tokens_s(512) == found.first_tokens_s(8192) > found.first_tokens_s(400)


def test_context_costs_at_least_as_much_as_in_tensor_parallel_steps() -> None:
    """It hides in token parallel steps that take their time to be launched."""
    model = StepModel()
    for row in measured(4):
        seconds = 0.05 if row.parallelism is Parallelism.TOKEN else row.seconds
        model.calibrate(Step.measured([replace(row, seconds=seconds)]))
    tensor, token = model.cost(4), TokenCost.of(model, 4)
    assert token is not None
    assert model.cost(4, Parallelism.TOKEN).context_token_s < tensor.context_token_s
    assert token.cost.context_token_s == tensor.context_token_s == pytest.approx(2e-8, rel=0.01)
    assert token.cost.prefill_pair_s == tensor.prefill_pair_s == pytest.approx(2e-9, rel=0.01)


@given(st.integers(0, 8192), st.integers(0, 90_000), st.integers(0, 1024), st.integers(1, 2000))
def test_the_shorter_step_is_chosen(
    prefill_tokens: int, before: int, sequences: int, context: int
) -> None:
    """As exactly as the start's steps are fitted, for any step of 64 tokens or more."""
    contents = prefill_tokens, sequences, before + sequences * context, prefill_tokens * before
    chosen = CHOICE.choose(SIZE, *contents)
    assert chosen is CHOICE.choose(SIZE, *contents)
    if prefill_tokens + sequences < 64:
        assert chosen is Parallelism.TENSOR
    else:
        least_s = min(cost.step_s(*contents) for cost in BOTH.values())
        assert BOTH[chosen].step_s(*contents) <= 1.01 * least_s


@given(st.integers(64, 8192))
def test_prompts_change_the_choice_where_the_costs_cross(tokens: int) -> None:
    crosses = (TOKEN.fixed_s - TENSOR.fixed_s) / (TENSOR.prefill_token_s - TOKEN.prefill_token_s)
    if abs(tokens - crosses) > 0.05 * crosses:
        chosen = CHOICE.choose(SIZE, tokens, 0, 0, 0)
        assert chosen is (Parallelism.TOKEN if tokens > crosses else Parallelism.TENSOR)


@pytest.mark.parametrize("only_measured", list(Parallelism))
def test_steps_are_tensor_parallel_unless_both_were_measured(
    only_measured: Parallelism,
) -> None:
    """Nor are they in groups of another size."""
    choice = ParallelismChoice(measured(SIZE, {only_measured: FREE}))
    assert choice.choose(SIZE, 8192, 0, 0, 0) is Parallelism.TENSOR
    assert CHOICE.choose(2, 8192, 0, 0, 0) is Parallelism.TENSOR
    assert CHOICE.choose(1, 8192, 0, 0, 0) is Parallelism.TENSOR
    assert ParallelismChoice([]).choose(SIZE, 8192, 0, 0, 0) is Parallelism.TENSOR


def test_steps_smaller_than_any_measured_one_are_tensor_parallel() -> None:
    choice = ParallelismChoice(
        measured(SIZE, {Parallelism.TENSOR: TENSOR, Parallelism.TOKEN: FREE})
    )
    assert choice.choose(SIZE, 30, 33, 330, 0) is Parallelism.TENSOR
    assert choice.choose(SIZE, 30, 34, 340, 0) is Parallelism.TOKEN


@pytest.mark.parametrize("size", [2, 8])
def test_each_engine_has_two_tokens_of_a_token_parallel_step(size: int) -> None:
    """Even if smaller steps were measured."""
    rows = [
        CalibrationRow(size, seconds, tokens, True, 0, parallelism)
        for tokens in (2, 8, 64)
        for parallelism, seconds in ((Parallelism.TENSOR, 0.01), (Parallelism.TOKEN, 0.001))
    ]
    assert ParallelismChoice(rows).choose(size, size, size - 1, 0, 0) is Parallelism.TENSOR
    assert ParallelismChoice(rows).choose(size, size, size, 0, 0) is Parallelism.TOKEN


@given(st.integers(0, 200), st.integers(0, 200))
def test_no_step_below_the_least_divides_tokens(prefill_tokens: int, sequences: int) -> None:
    """So nothing is computed for small steps but their tokens."""
    least = CHOICE.least_tokens(SIZE)
    if prefill_tokens + sequences < least:
        assert CHOICE.choose(SIZE, prefill_tokens, sequences, 0, 0) is Parallelism.TENSOR
    assert least == 64
    assert CHOICE.least_tokens(1) == CHOICE.least_tokens(2) == math.inf
