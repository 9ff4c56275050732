"""Arrivals: how often requests come, as far as chance allows to say."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.predict.arrivals import LEAST_RATE, Arrivals


def after(times_s: list[float]) -> Arrivals:
    """Return what is known after arrivals at these times."""
    arrivals = Arrivals()
    for time_s in times_s:
        arrivals.add(time_s)
    return arrivals


def test_the_first_question_knows_of_no_arrival_and_of_no_error() -> None:
    """It begins the record: the next one counts the time since."""
    arrivals = Arrivals()
    assert arrivals.rate_with_error(100.0) == (LEAST_RATE, 0.0)
    rate, deviation = arrivals.rate_with_error(100.1)
    assert rate >= LEAST_RATE and deviation > 0


def at_random(rate: float, seconds: float, seed: int, begin_s: float = 0.0) -> list[float]:
    """Return times of arrivals."""
    draw = random.Random(seed)
    times_s = [begin_s + draw.expovariate(rate)]
    while times_s[-1] < begin_s + seconds:
        times_s.append(times_s[-1] + draw.expovariate(rate))
    return times_s


@pytest.mark.deep
@pytest.mark.parametrize("rate", [0.5, 2.0, 10.0, 100.0])
def test_a_steady_rate_is_found(rate: float) -> None:
    """Of arrivals at random: right on average, and hardly ever twice as high."""
    arrivals, seen = Arrivals(), []
    for time_s in at_random(rate, 400.0, 1):
        if time_s > 50.0:
            seen.append(arrivals.rate_with_error(time_s)[0])
        arrivals.add(time_s)
    assert sum(seen) / len(seen) == pytest.approx(rate, rel=0.2)
    assert sum(value > 2 * rate for value in seen) / len(seen) < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_a_burst_is_noticed_at_once_and_its_end_soon(seed: int) -> None:
    """Within a second or two, at four times the rate."""
    quiet_s, burst_s = at_random(2.0, 60.0, seed), at_random(8.0, 30.0, seed, 61.0)
    assert after(quiet_s).rate_with_error(60.0)[0] < 4.0
    begun = after([*quiet_s, *(time_s for time_s in burst_s if time_s < 63.0)])
    assert begun.rate_with_error(63.0)[0] > 4.0
    over = after([*quiet_s, *burst_s])
    assert over.rate_with_error(91.0)[0] > 5.0
    assert over.rate_with_error(94.0)[0] < 3.0


@settings(deadline=None)
@given(times_s=st.lists(st.floats(0, 100), max_size=60).map(sorted), wait_s=st.floats(5, 50))
def test_without_arrivals_the_rate_falls(times_s: list[float], wait_s: float) -> None:
    """To nothing; it is never negative."""
    arrivals = after(times_s)
    now_s = times_s[-1] if times_s else 0.0
    last, later = arrivals.rate_with_error(now_s)[0], arrivals.rate_with_error(now_s + wait_s)[0]
    assert last >= LEAST_RATE if times_s else last == LEAST_RATE
    assert LEAST_RATE <= later <= max(1.0, last)
    assert arrivals.rate_with_error(now_s + 1000.0)[0] == LEAST_RATE


def test_many_at_once_are_no_trouble() -> None:
    """Thousands in one moment after hours of silence: a very high rate, and it passes."""
    arrivals = after([0.0, *[7200.0] * 5000])
    assert 500.0 < arrivals.rate_with_error(7200.1)[0] < 1e6
    assert arrivals.rate_with_error(7230.0)[0] < 10.0


def test_the_usual_rate_is_the_long_run_mean() -> None:
    """A burst changes it little, while the present rate follows."""
    arrivals = after([*at_random(1.0, 600.0, 1), *at_random(10.0, 8.0, 2, 600.0)])
    assert arrivals.rate_with_error(608.0)[0] > 6.0
    assert 0.8 < arrivals.usual_rate < 2.0


@pytest.mark.parametrize("rate", [2.0, 20.0])
def test_the_rate_of_a_burst_is_uncertain_at_first(rate: float) -> None:
    """Steady arrivals tell the rate better the longer they last; a change makes it uncertain."""
    before_s = at_random(rate, 120.0, 3)
    steady = after(before_s).rate_with_error(120.0)
    assert steady[1] < 0.25 * steady[0]
    burst_s = at_random(5 * rate, 20.0, 4, 120.0)
    errors = []
    for seconds in (1.0, 4.0, 16.0):
        known = after([*before_s, *(time_s for time_s in burst_s if time_s < 120.0 + seconds)])
        mean, error = known.rate_with_error(120.0 + seconds)
        errors.append(error / mean)
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 2 * errors[-1]


@settings(deadline=None)
@given(times_s=st.lists(st.floats(0, 100), max_size=60).map(sorted), wait_s=st.floats(0, 50))
def test_an_error_of_the_rate_is_never_negative(times_s: list[float], wait_s: float) -> None:
    arrivals = after([0.0, *times_s])
    now_s = max([0.0, *times_s]) + wait_s
    mean, error = arrivals.rate_with_error(now_s)
    assert mean == arrivals.rate_with_error(now_s)[0]
    assert 0.0 <= error < math.inf
