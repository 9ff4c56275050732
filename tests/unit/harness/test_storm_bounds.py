"""How far a stream of a storm may be from its reference: nothing wrong passes, and no rounding
fails.
"""

import math

import pytest

from harness.storm_bounds import CHANCE, Bounds, rounding_bounds

NEAR = [0.01 * (-1) ** token for token in range(48)]
ZERO = [0.0] * len(NEAR)


def test_bounds_in_float32_are_rounding_errors_and_no_near_tie() -> None:
    bounds = Bounds()
    assert bounds.problem([1.0, 2.00005], [1.0, 2.0]) is None
    assert bounds.problem([1.0, 2.001], [1.0, 2.0]) is not None
    assert bounds.lead == 0.0


def test_bounds_follow_from_the_degrees_that_are_furthest_apart() -> None:
    further = [2 * logprob for logprob in NEAR]
    bounds = rounding_bounds([(NEAR, ZERO), (further, ZERO)])
    assert bounds.logprob == pytest.approx(CHANCE * 0.02)
    assert bounds.mean == pytest.approx(CHANCE * 0.02)
    assert bounds.lead == pytest.approx(2 * bounds.logprob)


def test_stream_as_far_as_undisturbed_degrees_is_right() -> None:
    bounds = rounding_bounds([(NEAR, ZERO)])
    assert bounds.problem([-logprob for logprob in NEAR], ZERO) is None


def test_one_token_that_is_further_off_is_wrong() -> None:
    bounds = rounding_bounds([(NEAR, ZERO)])
    wrong = [*NEAR[:20], NEAR[20] + 0.01, *NEAR[21:]]
    assert "beyond" in str(bounds.problem(wrong, ZERO))


@pytest.mark.parametrize("logprob", [math.nan, math.inf])
def test_logprob_that_is_no_number_is_wrong(logprob: float) -> None:
    assert rounding_bounds([(NEAR, ZERO)]).problem([logprob], [0.0]) is not None


def test_stream_whose_tokens_are_all_a_little_off_is_wrong() -> None:
    """No token alone is: one of the undisturbed degrees had one as far off."""
    odd = [0.05, *NEAR[1:]]
    bounds = rounding_bounds([(odd, ZERO)])
    assert "in the mean" in str(bounds.problem([0.02] * len(ZERO), ZERO))
    assert bounds.problem([0.02] * 15, ZERO[:15]) is None
