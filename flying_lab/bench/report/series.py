"""The data of the figures, as plain numbers: percentiles over time, distributions, token gaps near
switches.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from flying_lab.results.results import Floats, Ints, Mask

MOST_POINTS = 1500
"""The most columns of a picture, so that a page stays small for any trace."""
AROUND_S = 1.0
"""A token gap is near a switch from its order until this long after its cutover."""
_WIDTHS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_WINDOWS = 60
_OVERLAP = 4


def window_s(duration_s: float) -> float:
    """Return a round width of the window for percentiles over time, about a sixtieth of the
    whole.
    """
    return next((width for width in _WIDTHS_S if width >= duration_s / _WINDOWS), _WIDTHS_S[-1])


def rolling(
    times_s: Floats, values: Floats, width_s: float, duration_s: float, percentile: float
) -> tuple[Floats, Floats]:
    """Return (points from 0 to `duration_s`, the percentile of the values in the window of
    `width_s` around each).

    NaN where there are no values; values or times that are NaN do not count.
    """
    known = ~(np.isnan(times_s) | np.isnan(values))
    order = np.argsort(times_s[known], kind="stable")
    times, kept = times_s[known][order], values[known][order]
    points = np.arange(0.0, duration_s + width_s / _OVERLAP / 2, width_s / _OVERLAP)
    begins = np.searchsorted(times, points - width_s / 2)
    ends = np.searchsorted(times, points + width_s / 2)
    heights = [
        float(np.percentile(kept[begin:end], percentile)) if end > begin else float("nan")
        for begin, end in zip(begins, ends, strict=True)
    ]
    return np.asarray(points, dtype=np.float64), np.asarray(heights, dtype=np.float64)


def thinned(times_s: Floats, levels: Ints, most: int = MOST_POINTS) -> tuple[Floats, Ints]:
    """Return a step function with a bounded number of steps: where there were more, the highest
    level of each stretch.
    """
    if len(times_s) <= most:
        return times_s, levels
    edges = np.linspace(times_s[0], times_s[-1], most + 1)
    at = np.searchsorted(times_s, edges, side="right")
    highest = [
        int(levels[max(0, begin - 1) : max(begin, end)].max())
        for begin, end in itertools.pairwise(at)
    ]
    return edges[:-1], np.asarray(highest, dtype=np.int64)


def cumulative(values: Floats, most: int = MOST_POINTS // 4) -> tuple[Floats, Floats]:
    """Return the distribution of the values that are no NaN: (values ascending, share of all that
    is not above, 0 to 1).
    """
    known = np.sort(values[~np.isnan(values)])
    if not len(known):
        return known, known
    places = np.unique(
        np.linspace(0, len(known) - 1, min(most, len(known))).round().astype(np.int64)
    )
    return known[places], (places + 1) / len(known)


def overlapping(begin_s: Floats, end_s: Floats, windows: Sequence[tuple[float, float]]) -> Mask:
    """Return which of the stretches [begin, end] have a part in any window, ends included."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(windows):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    if not merged:
        return np.zeros(len(begin_s), dtype=bool)
    starts, stops = (np.asarray(side) for side in zip(*merged, strict=True))
    first = np.searchsorted(stops, begin_s)
    return np.asarray(np.append(starts, np.inf)[first] <= end_s, dtype=bool)
