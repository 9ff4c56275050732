"""LaneFigures: what prompts cost beside the steps that are made anyway."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.predict.steps import StepCost
from flying_serving.predict.work import LaneFigures

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
