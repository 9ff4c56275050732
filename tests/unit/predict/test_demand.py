"""Demand: how often requests come and how long they are, lately."""

import itertools
import random
from collections.abc import Iterator
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.predict.demand import MARGIN_TOKENS, Demand, Outputs, expected_outputs


def ended(demand: Demand, tokens: int) -> None:
    """Let a request get `tokens` and end."""
    demand.grew(0, tokens)
    demand.finished(tokens)


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_expected_lengths_are_means_of_past_requests(lengths: list[int]) -> None:
    """Of all at first, of the last ones later; a typical length until there is one, which counts
    for a while.
    """
    demand = Demand((77.0, 77.0))
    assert demand.prompt_tokens == 77.0
    assert demand.output_tokens == 77.0
    for number, length in enumerate(lengths):
        demand.arrived(length, 10_000, float(number))
        ended(demand, length)
        if number + 1 < 50:
            so_far = [77, *lengths[: number + 1]]
            assert demand.prompt_tokens == pytest.approx(sum(so_far) / len(so_far))
        assert min(77, *lengths) <= demand.prompt_tokens * (1 + 1e-9)
        assert demand.prompt_tokens <= max(77, *lengths) * (1 + 1e-9)
    assert demand.output_tokens == pytest.approx(demand.prompt_tokens, rel=0.1)


def test_lengths_follow_a_change() -> None:
    """After some hundred requests nothing is left of the ones before."""
    demand = Demand()
    for length in [1000] * 300 + [50] * 300:
        ended(demand, length)
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
    [
        ("equal", 0.07, 0.1),
        ("even", 0.05, 0.06),
        ("exponential", 0.02, 0.02),
        ("heavy", 0.08, 0.45),
    ],
)
def test_remaining_output_is_estimated_near_the_simulated(
    lengths: str, within: float, longest_within: float
) -> None:
    """Of sixteen at a time, each replaced when it ends: as simulated; the longest of heavy tails is
    underestimated.
    """
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
    assert mean(outputs.longest(got, 16) for got in had) == pytest.approx(
        mean(longest), rel=longest_within
    )


@given(
    mean_tokens=st.floats(1, 1e4),
    spread=st.floats(1, 50),
    had=st.floats(0, 1e5),
    count=st.integers(1, 500),
)
def test_longest_running_request_is_expected_at_least_one_token(
    mean_tokens: float, spread: float, had: float, count: int
) -> None:
    """The longest of many gets no less than one of them does."""
    outputs = Outputs(mean_tokens, spread * mean_tokens**2)
    assert 1 <= outputs.left(had) <= outputs.longest(had, count)
    assert outputs.left(0) == pytest.approx(mean_tokens)


def test_lengths_and_their_squares_are_learned() -> None:
    demand = Demand((512.0, 30.0))
    for tokens in (10, 10, 10, 210):
        demand.arrived(100, 1000, 0.0)
        ended(demand, tokens)
    assert demand.outputs.mean == pytest.approx((30 + 240) / 5)
    assert demand.outputs.square == pytest.approx((4 / 3 * 30**2 + 3 * 10**2 + 210**2) / 5)


def test_outputs_are_expected_as_hinted_or_as_learned_with_a_margin() -> None:
    assert expected_outputs(200.4, most=4000) == 200 + MARGIN_TOKENS
    assert expected_outputs(200.4, most=4000, hint=50) == 50 + MARGIN_TOKENS
    assert expected_outputs(200.4, most=100) == 100
    assert expected_outputs(0.0, most=1, hint=0) == 1


def rates(size: int, gaps_s: Iterator[float], seconds: float = 600.0) -> list[float]:
    """Return the rate at each half second while events of `size` requests come after these gaps."""
    demand, seen, next_s, event = Demand(), list[float](), next(gaps_s), 0
    for half in range(1, int(2 * seconds)):
        while next_s <= half / 2:
            for _ in range(size):
                demand.arrived(100, 100, next_s, f"e{event}")
            event, next_s = event + 1, next_s + next(gaps_s)
        seen.append(demand.work(0, 0, 0, half / 2).rate)
    return seen


SETTLED = 200
"""Half seconds after which the size of events is known."""


@pytest.mark.parametrize(
    ("size", "low", "high", "most"),
    [
        (1, 0.8, 1.25, 2.0),
        (2, 0.8, 1.25, 2.0),
        (4, 0.8, 1.25, 2.0),
        (8, 0.8, 1.4, 3.0),
        (32, 0.7, 1.7, 4.0),
    ],
)
def test_even_events_of_one_request_per_second_are_no_burst(
    size: int, low: float, high: float, most: float
) -> None:
    """However many requests come together."""
    seen = rates(size, itertools.repeat(float(size)))
    assert low < median(seen) < high
    assert max(seen[SETTLED:]) < most
    assert min(seen[SETTLED:]) > 0.2


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("size", "low", "high", "most"),
    [
        (1, 0.7, 1.4, 5.0),
        (2, 0.7, 1.4, 5.0),
        (4, 0.6, 1.6, 6.0),
        (8, 0.5, 2.0, 7.0),
        (32, 0.4, 2.5, 12.0),
    ],
)
def test_events_at_random_are_as_uncertain_as_their_number(
    size: int, low: float, high: float, most: float, seed: int
) -> None:
    """In a rate's usual 300 s come 300 / size events at 1 request/s: a rate known to a factor of 1
    +- sqrt(size / 300).

    A highest value over ten minutes is that of the shortest gaps: two events of 32 within seconds
    are a burst for a while, as they would be for any estimate that notices one.
    """
    draw = random.Random(seed)
    seen = rates(size, iter(lambda: draw.expovariate(1 / size), None))
    assert low < median(seen) < high
    assert max(seen[SETTLED:]) < most


def test_a_burst_of_events_is_noticed() -> None:
    """Eight times as many events of the same size, for some seconds."""
    gaps_s = itertools.chain(itertools.repeat(4.0, 50), itertools.repeat(0.5, 20))
    assert rates(4, gaps_s, seconds=208.0)[-1] > 4.0


def test_a_batch_counts_with_each_of_its_prompts() -> None:
    """In lengths."""
    demand = Demand((100.0, 100.0))
    for tokens in (400, 700):
        demand.arrived(tokens, 100, 0.0, "batch")
    assert demand.prompt_tokens == pytest.approx((100 + 400 + 700) / 3)
