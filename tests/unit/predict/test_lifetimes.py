"""Lifetimes: lengths of outputs, also while most of a burst still runs."""

import random
from collections.abc import Callable
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.predict.lifetimes import BEYOND, Lifetimes

LENGTHS: dict[str, Callable[[random.Random], float]] = {
    "constant": lambda draw: 200.0,
    "uniform": lambda draw: draw.uniform(1, 400),
    "exponential": lambda draw: draw.expovariate(1 / 200),
}
SQUARES = {"constant": 1.0, "uniform": 4 / 3, "exponential": 2.0}
"""Mean square of a length, by the square of the mean."""


class Service:
    """Requests that get a token at each step; with `at_a_time`, each that ends is replaced."""

    def __init__(self, lengths: str, at_a_time: int, seed: int) -> None:
        self.lifetimes = Lifetimes(128.0)
        self.draw, self.lengths = random.Random(seed), LENGTHS[lengths]
        self.at_a_time = at_a_time
        self.running: list[list[int]] = []
        """Of each request, its length and its tokens."""

    def begin(self, count: int) -> None:
        for _ in range(count):
            self.running.append([max(1, round(self.lengths(self.draw))), 0])

    def step(self) -> None:
        for request in self.running:
            request[1] += 1
            self.lifetimes.grew(request[1] - 1, request[1])
        for length, _ in [request for request in self.running if request[0] == request[1]]:
            self.lifetimes.ended(length)
        self.running = [request for request in self.running if request[0] > request[1]]
        self.begin(max(0, self.at_a_time - len(self.running)))


@pytest.mark.parametrize(("at_a_time", "steps"), [(4, 40_000), (100, 2_500)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_steady_load_has_its_mean_length_and_square(
    lengths: str, at_a_time: int, steps: int
) -> None:
    """In the long run, with few requests at a time and with more than are remembered."""
    service, seen = Service(lengths, at_a_time, 7), []
    for step in range(steps):
        service.step()
        if step > steps // 4 and step % 10 == 0:
            seen.append(service.lifetimes.moments)
    assert mean(length for length, _ in seen) == pytest.approx(200, rel=0.05)
    assert mean(square for _, square in seen) == pytest.approx(SQUARES[lengths] * 200**2, rel=0.1)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_burst_of_simultaneous_requests_does_not_change_the_mean(lengths: str) -> None:
    """At no time from its begin to its end, in the mean of some bursts."""
    services = [Service(lengths, 4, seed) for seed in range(12)]
    for service in services:
        for _ in range(5000):
            service.step()
        service.begin(100)
    for step in range(400):
        for service in services:
            service.step()
        seen = [service.lifetimes.moments[0] for service in services]
        assert mean(seen) == pytest.approx(200, rel=0.13), step
        assert median(seen) == pytest.approx(200, rel=0.15), step


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=49))
def test_ended_requests_alone_have_their_plain_mean(lengths: list[int]) -> None:
    lifetimes = Lifetimes(77.0)
    for length in lengths:
        lifetimes.grew(0, length)
        lifetimes.ended(length)
    expected = mean([77, *lengths])
    square = mean([4 / 3 * 77**2, *(length**2 for length in lengths)])
    assert lifetimes.moments[0] == pytest.approx(expected)
    assert lifetimes.moments[1] == pytest.approx(square)


@given(tokens=st.integers(200, 10_000), count=st.integers(20, 500))
def test_requests_that_outlast_all_ended_ones_raise_the_mean(tokens: int, count: int) -> None:
    """Before any of them has ended: at a server that has just begun, with a shorter prior."""
    lifetimes = Lifetimes(100.0)
    for _ in range(count):
        for before in range(0, tokens, 50):
            lifetimes.grew(before, min(tokens, before + 50))
    assert 0.9 * tokens < lifetimes.moments[0] <= BEYOND * tokens


@given(steps=st.lists(st.integers(1, 40), max_size=50))
def test_tokens_count_alike_in_any_portions(steps: list[int]) -> None:
    whole, parts = Lifetimes(100.0), Lifetimes(100.0)
    total = 0
    for step in steps:
        parts.grew(total, total + step)
        total += step
    whole.grew(0, total)
    assert whole.moments == parts.moments


def test_a_long_output_of_long_ago_is_not_expected_again() -> None:
    """Neither by requests that end as usual nor by those that outlast them."""
    lifetimes = Lifetimes(100.0)
    for tokens in (8000, *[100] * 200):
        lifetimes.grew(0, tokens)
        lifetimes.ended(tokens)
    lifetimes.grew(0, 400)
    assert lifetimes.moments[0] < 200.0


def test_requests_that_outlast_all_ended_ones_are_uniform_beyond() -> None:
    """By hand: 1 of 4 requests ends, with 100 tokens, and the mean square is 4/3 of the square of
    the mean. The interval that the others have passed last begins with 2**(63 / 8) tokens.
    """
    lifetimes = Lifetimes(100.0)
    for _ in range(3):
        lifetimes.grew(0, 256)
    longest = BEYOND * round(2 ** (63 / 8))
    mean_tokens, square = lifetimes.moments
    assert mean_tokens == pytest.approx(100 / 4 + longest * 3 / 4)
    assert square == pytest.approx(4 / 3 * (100**2 / 4 + longest**2 * 3 / 4))
