"""TokenCost: what the token parallel steps of a group cost, and which steps are made so."""

import math

import pytest
from msgspec.structs import replace

from flying_serving.layout.parallelism import Parallelism
from flying_serving.predict.steps import Step, StepCost, StepModel
from flying_serving.predict.token_cost import TokenCost
from flying_serving.wire import CalibrationRow
from tests.unit.predict.token_costs import TENSOR, TOKEN, measured


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
