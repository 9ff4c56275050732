"""Demand: how often requests come and how long they are, lately."""

import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.policy.demand import FIRST, Demand, Outputs


def after(times_s: list[float]) -> Demand:
    """Return the demand after arrivals at these times."""
    demand = Demand()
    for time_s in times_s:
        demand.arrived(100, time_s)
    return demand


def at_random(rate: float, seconds: float, seed: int) -> list[float]:
    """Return times of arrivals."""
    draw = random.Random(seed)
    times_s = [draw.expovariate(rate)]
    while times_s[-1] < seconds:
        times_s.append(times_s[-1] + draw.expovariate(rate))
    return times_s


@pytest.mark.parametrize("rate", [0.5, 2.0, 10.0, 100.0])
def test_a_steady_rate_is_found(rate: float) -> None:
    """On average over a while, of arrivals at random."""
    demand, seen = Demand(), []
    for time_s in at_random(rate, 400.0, 1):
        if time_s > 50.0:
            seen.append(demand.rate(time_s))
        demand.arrived(100, time_s)
    assert sum(seen) / len(seen) == pytest.approx(rate, rel=0.25)


def test_a_burst_is_noticed_at_once_and_its_end_soon() -> None:
    """Within a few requests; chance alone is not taken for one."""
    quiet_s = [2.0 * number for number in range(20)]
    burst_s = [40.0 + 0.05 * number for number in range(21)]
    assert after(quiet_s).rate(40.0) < 1.5
    assert after(quiet_s + burst_s).rate(41.0) > 6.0
    assert after(quiet_s + burst_s).rate(60.0) < 2.0


@given(
    times_s=st.lists(st.floats(0, 100), max_size=30).map(sorted),
    first_s=st.floats(0, 50),
    then_s=st.floats(0, 50),
)
def test_without_arrivals_the_rate_only_falls(times_s: list[float], first_s: float, then_s: float) -> None:
    """To nothing; and it is never negative."""
    demand = after(times_s)
    now_s = times_s[-1] if times_s else 0.0
    assert demand.rate(now_s + first_s) >= demand.rate(now_s + first_s + then_s) >= 0.0
    assert demand.rate(now_s + 1000.0) < 0.01
    assert (demand.rate(now_s) > 0) == bool(times_s)


@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=200))
def test_lengths_are_means_of_what_has_come(lengths: list[int]) -> None:
    """Of all at first, of the last ones later; a typical length until there is one, which counts for a while."""
    demand = Demand(prompt_tokens=77.0, output_tokens=77.0)
    assert (demand.prompt_tokens, demand.output_tokens) == (77.0, 77.0)
    for number, length in enumerate(lengths):
        demand.arrived(length, float(number))
        demand.finished(length)
        if number + FIRST < 50:
            so_far = [77] * FIRST + lengths[: number + 1]
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


LENGTHS = {
    "equal": lambda draw: 100.0,
    "even": lambda draw: draw.uniform(0, 200),
    "exponential": lambda draw: draw.expovariate(1 / 100),
    "heavy": lambda draw: draw.lognormvariate(4, 1.2),
}


@pytest.mark.parametrize("lengths", LENGTHS)
def test_what_running_requests_still_get(lengths: str) -> None:
    """Of sixteen at a time, each replaced when it ends: as simulated, within a third, the longest within 60 %."""
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
    assert mean(outputs.left(got) for got in had) == pytest.approx(mean(left), rel=0.34)
    assert mean(outputs.longest(got, 16) for got in had) == pytest.approx(mean(longest), rel=0.6)


@given(mean_tokens=st.floats(1, 1e4), spread=st.floats(1, 50), had=st.floats(0, 1e5), count=st.integers(1, 500))
def test_somebody_who_runs_gets_a_token_at_least(mean_tokens: float, spread: float, had: float, count: int) -> None:
    """The longest of many gets no less than one of them does."""
    outputs = Outputs(mean_tokens, spread * mean_tokens**2)
    assert 1 <= outputs.left(had) <= outputs.longest(had, count)
    assert outputs.left(0) == pytest.approx(mean_tokens)


def test_lengths_are_learned() -> None:
    """Their squares too."""
    demand = Demand(output_tokens=30.0)
    for tokens in (10, 10, 10, 210):
        demand.finished(tokens)
    assert demand.outputs.mean == pytest.approx((FIRST * 30 + 240) / (FIRST + 4))
    assert demand.outputs.square == pytest.approx((FIRST * 4 / 3 * 30**2 + 3 * 10**2 + 210**2) / (FIRST + 4))
