"""Demand: how often requests come and how long they are, lately."""

import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.predict.demand import MARGIN_TOKENS, Demand, Outputs, expected_outputs


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_lengths_are_means_of_what_has_come(lengths: list[int]) -> None:
    """Of all at first, of the last ones later; a typical length until there is one, which counts for a while."""
    demand = Demand((77.0, 77.0))
    assert (demand.prompt_tokens, demand.output_tokens) == (77.0, 77.0)
    for number, length in enumerate(lengths):
        demand.arrived(length, 10_000, float(number))
        demand.finished(length)
        if number + 1 < 50:
            so_far = [77, *lengths[: number + 1]]
            assert demand.prompt_tokens == pytest.approx(sum(so_far) / len(so_far))
        assert min(77, *lengths) <= demand.prompt_tokens * (1 + 1e-9)
        assert demand.prompt_tokens <= max(77, *lengths) * (1 + 1e-9)
    assert demand.output_tokens == demand.prompt_tokens


def test_lengths_follow_a_change() -> None:
    """After some hundred requests nothing is left of the ones before."""
    demand = Demand()
    for length in [1000] * 300 + [50] * 300:
        demand.finished(length)
    assert demand.output_tokens < 60


def test_no_output_is_expected_to_be_longer_than_it_may_get() -> None:
    """What clients ask for at most is known before any request has ended."""
    demand = Demand((512.0, 128.0))
    for number in range(9):
        demand.arrived(100, 8, float(number))
    assert demand.output_tokens == pytest.approx((128 + 9 * 8) / 10)
    assert demand.outputs.mean == demand.output_tokens
    assert demand.outputs.square == pytest.approx(4 / 3 * demand.output_tokens**2)


LENGTHS = {
    "equal": lambda draw: 100.0,
    "even": lambda draw: draw.uniform(0, 200),
    "exponential": lambda draw: draw.expovariate(1 / 100),
    "heavy": lambda draw: draw.lognormvariate(4, 1.2),
}


@pytest.mark.parametrize(
    ("lengths", "within", "longest_within"),
    [("equal", 0.07, 0.1), ("even", 0.05, 0.06), ("exponential", 0.02, 0.02), ("heavy", 0.08, 0.45)],
)
def test_what_running_requests_still_get(lengths: str, within: float, longest_within: float) -> None:
    """Of sixteen at a time, each replaced when it ends: as simulated; the longest of heavy tails is underestimated."""
    draw, drawn = random.Random(1), list[float]()

    def new() -> float:
        drawn.append(max(1.0, LENGTHS[lengths](draw)))
        return drawn[-1]

    running = [[new(), draw.uniform(0, 90)] for _ in range(16)]
    left, longest, had = list[float](), list[float](), list[float]()
    for step in range(60_000):
        for one in running:
            one[1] += 1
            if one[1] >= one[0]:
                one[0], one[1] = new(), 0.0
        if step > 5_000 and step % 20 == 0:
            rest = [whole - got for whole, got in running]
            left.append(mean(rest))
            longest.append(max(rest))
            had.append(mean(got for _, got in running))
    outputs = Outputs(mean(drawn), mean(length**2 for length in drawn))
    assert mean(outputs.left(got) for got in had) == pytest.approx(mean(left), rel=within)
    assert mean(outputs.longest(got, 16) for got in had) == pytest.approx(mean(longest), rel=longest_within)


@given(mean_tokens=st.floats(1, 1e4), spread=st.floats(1, 50), had=st.floats(0, 1e5), count=st.integers(1, 500))
def test_somebody_who_runs_gets_a_token_at_least(mean_tokens: float, spread: float, had: float, count: int) -> None:
    """The longest of many gets no less than one of them does."""
    outputs = Outputs(mean_tokens, spread * mean_tokens**2)
    assert 1 <= outputs.left(had) <= outputs.longest(had, count)
    assert outputs.left(0) == pytest.approx(mean_tokens)


def test_lengths_and_their_squares_are_learned() -> None:
    demand = Demand((512.0, 30.0))
    for tokens in (10, 10, 10, 210):
        demand.arrived(100, 1000, 0.0)
        demand.finished(tokens)
    assert demand.outputs.mean == pytest.approx((30 + 240) / 5)
    assert demand.outputs.square == pytest.approx((4 / 3 * 30**2 + 3 * 10**2 + 210**2) / 5)


def test_outputs_are_expected_as_hinted_or_as_learned_with_a_margin() -> None:
    assert expected_outputs(200.4, most=4000) == 200 + MARGIN_TOKENS
    assert expected_outputs(200.4, most=4000, hint=50) == 50 + MARGIN_TOKENS
    assert expected_outputs(200.4, most=100) == 100
    assert expected_outputs(0.0, most=1, hint=0) == 1
