"""Counts of values in fixed buckets, cheap enough for every step, and plain enough to be sent
between processes.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class Histogram:
    """A histogram as Prometheus has it, or one whose `row` was sent.

    `bounds`: upper bounds of the buckets, increasing, each inside its bucket; one without bound
    follows them.
    """

    def __init__(self, bounds: Sequence[float], row: Sequence[float] | None = None) -> None:
        self._bounds = tuple(bounds)
        self.sum = 0.0 if row is None else row[0]
        self._counts = (
            [0] * (len(self._bounds) + 1) if row is None else [int(count) for count in row[1:]]
        )
        if len(self._counts) != len(self._bounds) + 1:
            raise ValueError(f"{len(self._counts)} counts for {len(self._bounds)} bounds")

    def observe(self, value: float) -> None:
        """Add a value to the sum and to the count of its bucket."""
        self.sum += value
        self._counts[bisect_left(self._bounds, value)] += 1

    @property
    def count(self) -> int:
        """The number of values that were observed."""
        return sum(self._counts)

    @property
    def row(self) -> list[float]:
        """Return the sum of all values, then the count of each bucket."""
        return [self.sum, *self._counts]

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it) as in Prometheus' text format, the last
        one `+Inf`.
        """
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))
