"""Numbers behind the figures, beside plain definitions of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flying_lab.bench.report import series
from flying_lab.results.metrics import token_gaps
from tests.unit.lab.bench.tables import record, results

TIMES = st.lists(st.floats(0, 100), min_size=1, max_size=30)


@given(times=TIMES, percentile=st.sampled_from([50.0, 90.0]), data=st.data())
def test_a_rolling_percentile_is_that_of_the_values_around_each_point(
    times: list[float], percentile: float, data: st.DataObject
) -> None:
    """In any order, NaN left out."""
    floats = st.floats(0, 10) | st.just(float("nan"))
    values = data.draw(st.lists(floats, min_size=len(times), max_size=len(times)))
    points, heights = series.rolling(np.asarray(times), np.asarray(values), 10.0, 100.0, percentile)
    assert points[0] == 0 and points[-1] == 100.0
    for point, height in zip(points, heights, strict=True):
        around = [
            value
            for at, value in zip(times, values, strict=True)
            if point - 5 <= at < point + 5 and not np.isnan(value)
        ]
        assert (
            np.isnan(height)
            if not around
            else np.isclose(height, np.percentile(around, percentile))
        )


def test_windows_are_round_and_about_a_sixtieth() -> None:
    """However long the replay."""
    assert [series.window_s(duration) for duration in (1.0, 60.0, 600.0, 3600.0, 1e9)] == [
        0.5,
        1.0,
        10.0,
        60.0,
        1800.0,
    ]


@given(steps=st.lists(st.integers(-3, 3), min_size=1, max_size=200), most=st.integers(1, 20))
def test_a_thinned_step_function_keeps_its_peak(steps: list[int], most: int) -> None:
    """It has no more steps than asked for, and lies nowhere below what it stands for."""
    times, levels = np.arange(len(steps), dtype=float), np.cumsum(np.asarray(steps, dtype=np.int64))
    thin_times, thin = series.thinned(times, levels, most)
    assert len(thin_times) == len(thin) <= max(most, 1) or len(steps) <= most
    assert thin.max() == levels.max()
    at = np.searchsorted(thin_times, times, side="right") - 1
    assert (thin[at][:-1] >= levels[:-1]).all()


@given(
    values=st.lists(st.floats(0, 10) | st.just(float("nan")), max_size=50), most=st.integers(2, 60)
)
def test_a_distribution_says_which_share_is_not_above(values: list[float], most: int) -> None:
    """At each of its points; the last is the largest value."""
    known = np.asarray([value for value in values if not np.isnan(value)])
    points, shares = series.cumulative(np.asarray(values, dtype=float), most)
    assert len(points) == len(shares) <= most
    for place, (point, share) in enumerate(zip(points, shares, strict=True)):
        if place + 1 == len(points) or points[place + 1] > point:
            assert (known < point).mean() < share <= (known <= point).mean() + 1e-12
    if len(known):
        assert points[-1] == known.max()
        assert shares[-1] == 1.0


def test_gaps_are_within_single_streams() -> None:
    """None from one request to another; the time before the first token is none."""
    begin, end = token_gaps(
        results(record(0, 0.0, [1.0, 2.0, 4.0]), record(1, 0.0, []), record(2, 0.0, [3.0]))
    )
    assert begin.tolist() == [1.0, 2.0] and end.tolist() == [2.0, 4.0]
    begin, end = token_gaps(results(record(0, 0.0, [])))
    assert len(begin) == len(end) == 0


@given(
    stretches=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=20),
    windows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), max_size=6),
)
def test_overlaps_are_found_in_any_order_of_windows(
    stretches: list[tuple[int, int]], windows: list[tuple[int, int]]
) -> None:
    """Windows may overlap each other."""
    ends = [(float(start), float(start + length)) for start, length in windows]
    begin = np.asarray([float(start) for start, _ in stretches])
    end = np.asarray([float(start + length) for start, length in stretches])
    found = series.overlapping(begin, end, ends)
    assert found.tolist() == [
        any(b <= stop and e >= start for start, stop in ends)
        for b, e in zip(begin, end, strict=True)
    ]
