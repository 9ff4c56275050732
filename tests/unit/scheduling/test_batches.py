"""Batches: how many prompt tokens a step may take."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.parallelism import Parallelism
from flying_serving.predict.steps import StepCost
from flying_serving.scheduling.batches import Batches, Running
from flying_serving.wire import CalibrationRow, StepRow
from tests.unit.predict.token_costs import TENSOR, TOKEN, measured

FIXED_S, TOKEN_S, SEQUENCE_S = 0.01, 0.001, 0.002
LEAST, MOST = 16, 512


def step_s(tokens: int, decoding: int) -> float:
    """What a step takes in these tests."""
    return FIXED_S + TOKEN_S * tokens + SEQUENCE_S * decoding


def batches(target_s: float, lanes: int = 1) -> Batches:
    """Of lane 1, after the measurements of the start."""
    made = Batches(target_s, MOST, LEAST, lambda: lanes)
    made.calibrate(
        [CalibrationRow(1, step_s(tokens, 0), tokens, True, 0) for tokens in (64, 256, 1024)]
        + [CalibrationRow(1, step_s(0, count), count, False, 16) for count in (1, 16, 64)]
    )
    return made


@given(target_s=st.floats(0.001, 2.0), decoding=st.integers(1, 100), lanes=st.integers(1, 3))
def test_step_takes_as_many_tokens_as_the_target_allows(
    target_s: float, decoding: int, lanes: int
) -> None:
    """Not one token more, nor a noticeable number less; a prompt always gets on."""
    tokens = batches(target_s, lanes).prompt_tokens(1, Running(decoding, 16 * decoding))
    assert tokens is not None
    assert LEAST <= tokens <= MOST
    if tokens > LEAST:
        assert step_s(tokens, decoding) <= target_s / lanes * 1.01
    if tokens < MOST:
        assert step_s(tokens + 16, decoding) >= target_s / lanes * 0.98


def test_tokens_before_a_prompt_are_not_those_of_requests_that_decode() -> None:
    """By hand, each with a cost of its own; the first reads as many tokens as the prompt has."""
    cost = StepCost(0.01, 1e-3, 2e-3, 1e-6, prefill_pair_s=1e-6)
    planned = Batches(0.2, MOST, LEAST, lambda: 1)
    planned.calibrate(
        [
            CalibrationRow(1, cost.step_s(tokens, 0, before, tokens * before), tokens, True, before)
            for tokens in (64, 256, 1024)
            for before in (0, 1000, 8000)
        ]
        + [
            CalibrationRow(1, cost.step_s(0, count, count * before), count, False, before)
            for count in (1, 16, 64)
            for before in (16, 500)
        ]
    )
    room_s = 0.2 - (0.01 + 5 * 2e-3 + 4000 * 1e-6)
    for before in (0, 300, 2000):
        found = planned.prompt_tokens(1, Running(5, 4000, 1, computed_tokens=before))
        assert found == pytest.approx(room_s / (1e-3 + 1e-6 * before), abs=1.5)


def test_a_token_parallel_step_takes_more_prompt_tokens_in_the_same_time() -> None:
    """By hand, each with a cost of its own."""
    plain, both = (Batches(0.05, 4096, LEAST, lambda: 1) for _ in range(2))
    plain.calibrate(measured(4, {Parallelism.TENSOR: TENSOR}))
    both.calibrate(measured(4))
    for planned, cost in ((plain, TENSOR), (both, TOKEN)):
        found = planned.prompt_tokens(4, Running(8, 4000))
        room_s = 0.05 - cost.step_s(0, 8, 4000)
        assert found == pytest.approx(room_s / cost.prefill_token_s, rel=0.02)


def test_prompts_alone_are_not_limited() -> None:
    """There is no token for which anyone waits, unless another lane of the engine has requests."""
    assert batches(0.05).prompt_tokens(1, Running(prefilling=3)) is None
    assert batches(0.05, lanes=2).prompt_tokens(1, Running(prefilling=3)) is not None


def test_a_lane_that_was_never_measured_is_not_limited() -> None:
    assert batches(0.05).prompt_tokens(2, Running(decoding=1)) is None


@pytest.mark.parametrize("lanes", [1, 2])
def test_steps_of_random_length_keep_to_the_target(lanes: int) -> None:
    """What steps take more than predicted is learned: about one in a hundred takes longer than the
    lane's share of the target.
    """
    draw, share_s = random.Random(1), 0.2
    planned, overruns = batches(share_s * lanes, lanes), []
    for _ in range(6000):
        tokens = planned.prompt_tokens(1, Running(decoding=8, context_tokens=128))
        assert tokens is not None
        took_s = step_s(tokens, 8) * draw.lognormvariate(0.0, 0.2)
        overruns.append(took_s > share_s)
        planned.stepped(StepRow(1, took_s, tokens, 8, 128, 0, False))
    assert sum(overruns[1000:]) / 5000 == pytest.approx(0.01, abs=0.004)


def test_steps_that_waited_for_another_lane_are_not_measured() -> None:
    planned = batches(0.2)
    before = planned.prompt_tokens(1, Running(decoding=8))
    for _ in range(50):
        planned.stepped(StepRow(1, 5.0, 64, 8, 0, 0, True))
    assert planned.prompt_tokens(1, Running(decoding=8)) == before
