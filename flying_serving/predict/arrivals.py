"""Arrivals per second: a rate that may change at any time, found by Bayesian online change point
detection.

After Adams and MacKay ("Bayesian online changepoint detection", 2007), for a Poisson rate with a
gamma prior. Each time at which the present rate may have begun has a weight and the arrivals since
then. A cluster of arrivals counts as a burst as soon as chance explains it less well than a change,
and not before.

The unit of arrival is an *event*: the requests that one client sends together, which are no
evidence of a burst (a compound Poisson process). The rate of requests is the rate of events times
the mean number of requests in one.
"""

import math
from typing import Any

import numpy as np
from scipy.special import gammaln

from flying_serving.predict.events import Events

BIN_S = 0.25
"""Seconds of the spans in which arrivals are counted; a rate can begin only at the start of one."""
CHANGE_S = 300.0
"""Mean duration of a rate before anything is known, and time constant of the long-run mean."""
AHEAD = 4.0
"""Mean of a new rate beforehand, as a multiple of the long-run mean: a burst matters more than a
lull.
"""
LEAST_RATE = 0.05
"""Requests per second that are always expected, so that the layout of an idle server suits its next
request.
"""
_RUNS = 200
_NEGLIGIBLE = 1e-6
_IDLE_BINS = 40
"""Number of empty bins above which they are closed as one long bin."""


class Arrivals:
    """Arrivals so far, and the rate that follows from them.

    `_weight`: probability that the present rate began at each of the recorded times, the latest
    last. `_count`, `_span_s`: events and seconds since then. `_all`, `_all_s`: events and seconds
    in the long run, fading.
    """

    def __init__(self) -> None:
        self._events = Events()
        self._weight: Any = np.ones(1)
        self._count: Any = np.zeros(1)
        self._span_s: Any = np.zeros(1)
        self._all = 1.0
        self._all_s = 1.0 / LEAST_RATE
        self._bin_from: float | None = None
        self._bin_count = 0

    def add(self, now_s: float, event: str | None = None) -> None:
        """Note that a request has arrived; `event` names the requests that it arrived with, None
        for a request alone.
        """
        self._close_until(now_s)
        self._bin_count += self._events.begins(event, now_s)

    def rate_with_error(self, now_s: float) -> tuple[float, float]:
        """Return the requests per second, at least LEAST_RATE, and the standard deviation of what
        they may be.

        It is large where the rate may just have changed. The first question begins the record, so
        that the time before the first arrival counts.
        """
        begins = self._bin_from is None
        bin_from = self._close_until(now_s)
        if begins:
            return LEAST_RATE, 0.0
        weight, counts, spans_s = self._after(self._bin_count, max(1e-3, now_s - bin_from))
        # of a gamma distribution for each time at which the rate may have begun
        shape, known_s, size = 1.0 + counts, self._prior_s + spans_s, self._events.mean_size
        mean = float(weight @ (shape / known_s))
        square = float(weight @ (shape * (shape + 1.0) / known_s**2))
        deviation = math.sqrt(max(0.0, square - mean**2))
        return max(LEAST_RATE, mean * size), deviation * size

    @property
    def usual_rate(self) -> float:
        """Requests per second in the long run."""
        return max(LEAST_RATE, self._all / self._all_s * self._events.mean_size)

    @property
    def _prior_s(self) -> float:
        """Seconds of the gamma prior of a new rate, whose shape is 1: its mean is AHEAD times the
        long-run mean.
        """
        return self._events.mean_size / (AHEAD * self.usual_rate)

    def _after(self, count: int, span_s: float) -> tuple[Any, Any, Any]:
        """Return weights, events and times after `count` events in `span_s` more, also of a rate
        that begins only then.
        """
        counts, spans_s = np.append(self._count, 0.0), np.append(self._span_s, 0.0)
        shape, known_s = 1.0 + counts, self._prior_s + spans_s
        # the negative binomial distribution that a gamma one makes of Poisson counts
        likelihood = (
            gammaln(shape + count) - gammaln(shape) + shape * np.log(known_s / (known_s + span_s))
        )
        likelihood += count * np.log(span_s / (known_s + span_s))
        change = 1.0 - math.exp(-min(span_s, CHANGE_S) / CHANGE_S)
        weight = np.append(self._weight * (1.0 - change), change)
        weight *= np.exp(likelihood - likelihood.max())
        return weight / weight.sum(), counts + count, spans_s + span_s

    def _close_until(self, now_s: float) -> float:
        """Close the bins that have ended. Returns when the present one began."""
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
        keep = math.exp(-span_s / CHANGE_S)
        self._all = 1.0 + keep * (self._all - 1.0) + count
        self._all_s = 1.0 / LEAST_RATE + keep * (self._all_s - 1.0 / LEAST_RATE) + span_s
