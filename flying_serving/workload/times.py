"""Times of traces that were rounded, spread again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def spread(times_s: Sequence[float], bin_s: float, seed: int) -> list[float]:
    """Times within their bins: each somewhere between its own value and `bin_s` later, but before the next value.

    Args:
        times_s: ascending; equal values are one bin.
        bin_s: width of a bin.
        seed: of the draws.

    Returns:
        Ascending times, as many.
    """
    rng = np.random.default_rng([seed, 0])
    values = np.asarray(times_s, dtype=float)
    starts, first, counts = np.unique(values, return_index=True, return_counts=True)
    widths = np.minimum(np.append(np.diff(starts), bin_s), bin_s)
    out = values.copy()
    for start, begin, count, width in zip(starts, first, counts, widths, strict=True):
        out[begin : begin + count] = start + np.sort(rng.random(count)) * width
    return [float(value) for value in out]
