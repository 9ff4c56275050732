"""How often requests come: a rate that may change at any time, found by Bayesian online change point detection.

After Adams and MacKay ("Bayesian online changepoint detection", 2007), for a Poisson rate with a gamma prior: for each
time at which the present rate may have begun there is a weight, and what has come since. A cluster of arrivals counts
for a burst as soon as chance explains it less well than a change would, and not before.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import gammaln

BIN_S = 0.25
"""Arrivals are counted in spans of this length; only in one of them can a rate begin."""
CHANGE_S = 30.0
"""A rate lasts so long on average, as far as is known beforehand."""
AHEAD = 4.0
"""Mean and standard deviation of a new rate, in units of the long-run mean: bursts are what matters."""
LONG_S, FIRST_S = 300.0, 60.0
"""Time constant of the long-run mean, and what it begins with: it grows with the time that is known."""
LEAST_RATE = 0.2
"""No long-run mean is taken to be lower."""
BURST_S = 20.0
"""Counts as one burst before any has been seen."""
HIGH = 1.5
"""A rate above this multiple of the long-run mean is a burst."""
LEAST_LEFT = 1 / 2
"""A burst goes on for this share of how long they usually last, or of how long it has, at least: it is often
younger than it seems, because a rate a little above the usual before it counts as its beginning."""
FEW = 5
"""Fewer arrivals than this are not taken for more than the long-run mean, however fast they came."""
_RUNS = 200
_NEGLIGIBLE = 1e-6
_IDLE_BINS = 40
"""More empty ones than this count as one long one."""


class Arrivals:
    """Arrivals so far, and the rate that follows from them.

    `_weight`: how probable it is that the present rate has begun at each of the times that are kept, the latest last;
    `_count`, `_span_s`: arrivals and time since.
    """

    def __init__(self) -> None:
        self._weight: Any = np.ones(1)
        self._count: Any = np.zeros(1)
        self._span_s: Any = np.zeros(1)
        self._mean = 0.0
        self._known_s = 0.0
        self._bin_from: float | None = None
        self._bin_count = 0
        self._any = False
        self._bursts = _Bursts()

    @property
    def usual_rate(self) -> float:
        """The long-run mean."""
        return self._mean

    @property
    def burst_s(self) -> float:
        """How long a rate that is higher than usual is expected to go on."""
        return self._bursts.left_s

    def add(self, now_s: float) -> None:
        """A request has come."""
        self._catch_up(now_s)
        self._bin_count += 1
        self._any = True

    def rate(self, now_s: float) -> float:
        """Requests per second; 0 before the first one."""
        bin_from = self._catch_up(now_s)
        if not self._any:
            return 0.0
        return self._expected(*self._after(self._bin_count, max(1e-3, now_s - bin_from)))

    @property
    def _prior_s(self) -> float:
        """The gamma prior of a new rate has shape 1: it is as if one request had come in this time."""
        return 1.0 / (AHEAD * max(self._mean, LEAST_RATE))

    def _after(self, count: int, span_s: float) -> tuple[Any, Any, Any]:
        """Weights, arrivals and times after `count` arrivals in `span_s` more, also of a rate that begins only then."""
        counts, spans_s = np.append(self._count, 0.0), np.append(self._span_s, 0.0)
        shape, known_s = 1.0 + counts, self._prior_s + spans_s
        # the negative binomial distribution that a gamma one makes of Poisson counts
        likelihood = gammaln(shape + count) - gammaln(shape) + shape * np.log(known_s / (known_s + span_s))
        likelihood += count * np.log(span_s / (known_s + span_s))
        change = 1.0 - math.exp(-min(span_s, CHANGE_S) / CHANGE_S)
        weight = np.append(self._weight * (1.0 - change), change)
        weight *= np.exp(likelihood - likelihood.max())
        return weight / weight.sum(), counts + count, spans_s + span_s

    def _expected(self, weight: Any, counts: Any, spans_s: Any) -> float:
        """The mean rate."""
        rates = (1.0 + counts) / (self._prior_s + spans_s)
        usual = max(self._mean, LEAST_RATE)
        return float(weight @ np.where(counts < FEW, np.minimum(rates, usual), rates))

    def _catch_up(self, now_s: float) -> float:
        """Close the bins that have ended. Returns when the present one has begun."""
        if self._bin_from is None:
            self._bin_from = now_s
        bins = int((now_s - self._bin_from) / BIN_S)
        if bins > 0:
            self._close(self._bin_count, BIN_S)
            self._bin_count = 0
            if bins > _IDLE_BINS:
                self._close(0, (bins - 1) * BIN_S)
            else:
                for _ in range(bins - 1):
                    self._close(0, BIN_S)
            self._bin_from += bins * BIN_S
        return self._bin_from

    def _close(self, count: int, span_s: float) -> None:
        weight, counts, spans_s = self._after(count, span_s)
        kept = np.flatnonzero(weight > _NEGLIGIBLE)[-_RUNS:]
        self._weight = weight[kept] / weight[kept].sum()
        self._count, self._span_s = counts[kept], spans_s[kept]
        rate = self._expected(self._weight, self._count, self._span_s)
        self._bursts.passed(span_s, high=self._any and rate > HIGH * self._mean)
        self._known_s += span_s if self._any else 0.0
        keep = math.exp(-span_s / min(LONG_S, max(FIRST_S, self._known_s)))
        self._mean = keep * self._mean + (1.0 - keep) * count / span_s


class _Bursts:
    """How long bursts last: the mean of those so far, the present one included, and of BURST_S."""

    def __init__(self) -> None:
        self._total_s = BURST_S
        self._count = 1
        self._present_s = 0.0

    @property
    def left_s(self) -> float:
        """Of the present one, or of one that began now."""
        mean_s = self._total_s / self._count
        return max(LEAST_LEFT * mean_s, LEAST_LEFT * self._present_s, mean_s - self._present_s)

    def passed(self, span_s: float, *, high: bool) -> None:
        """Some time has passed, with a high rate or not."""
        if not high:
            self._present_s = 0.0
            return
        if self._present_s == 0.0:
            self._count += 1
        self._present_s += span_s
        self._total_s += span_s
