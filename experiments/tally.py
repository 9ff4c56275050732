"""Times of requests that are forgotten when they have ended: what is kept of them does not grow
with their number.
"""

from __future__ import annotations

from bisect import bisect_right

from flying_lab.sim.requests import SimRequest

_GROWTH = 1.02
_LEAST_S = 1e-4
_EDGES = [_LEAST_S * _GROWTH**n for n in range(1000)]


class Tally:
    """Mean and quantiles of times, within 2 %, in constant memory."""

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0
        self._bins = [0] * (len(_EDGES) + 1)

    def add(self, seconds: float) -> None:
        """One more."""
        self.count += 1
        self.total_s += seconds
        self._bins[bisect_right(_EDGES, seconds)] += 1

    @property
    def mean_s(self) -> float:
        """Mean; 0 of nothing."""
        return self.total_s / self.count if self.count else 0.0

    def quantile_s(self, share: float) -> float:
        """The time that this share of all does not exceed."""
        left = share * self.count
        for edge, held in zip([*_EDGES, _EDGES[-1]], self._bins, strict=True):
            left -= held
            if left <= 0:
                return edge
        return _EDGES[-1]


class Totals:
    """What has become of the requests of nodes."""

    def __init__(self) -> None:
        self.ttft, self.tpot, self.e2e = Tally(), Tally(), Tally()
        self.refused = 0

    def add(self, request: SimRequest) -> None:
        """A request has ended or was refused."""
        if not request.ended:
            self.refused += 1
            return
        self.ttft.add(request.first_token_s - request.arrival_s)
        self.e2e.add(request.end_s - request.arrival_s)
        if request.tokens > 1:
            self.tpot.add((request.end_s - request.first_token_s) / (request.tokens - 1))
