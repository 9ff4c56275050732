"""Lengths of outputs, of requests that have ended and of requests that still run.

The ended requests alone are a biased sample: after a burst begins, its short outputs end first. So
the lengths are a life table (the estimate of Kaplan and Meier, in intervals of tokens). Of the
requests that have reached an interval, a share ends in it, and the others pass it. Requests that
still run count with the intervals that they have passed. No shape of the distribution is assumed.
"""

from bisect import bisect_right
from functools import cached_property
from typing import Any

import numpy as np

MEMORY_REQUESTS = 50
"""Requests over which lengths are averaged."""
INTERVALS_PER_DOUBLING = 8
"""Intervals between a number of tokens and its double: few ends per interval, of a fixed number."""
LONGEST_TOKENS = 2**24
BEYOND = 1.5
"""Expected length of a request that has outlasted all ended ones, as a multiple of its tokens."""
_POWERS = range(INTERVALS_PER_DOUBLING * (LONGEST_TOKENS.bit_length() - 1) + 1)
_EDGES = sorted({round(2.0 ** (power / INTERVALS_PER_DOUBLING)) for power in _POWERS})
_LEAST_EVIDENCE = 0.1
"""Requests that have reached an interval, below which nothing is concluded from it.

One long output would otherwise be expected again for ever by each request that outlasts the others.
"""


class Lifetimes:
    """A life table of outputs, in which `first_tokens` counts as one request at first.

    `_passed`, `_ended`: requests that have passed each interval, or ended in it. `_tokens`,
    `_squares`: tokens of the ended ones, and their squares, summed. All fade by ends, after
    MEMORY_REQUESTS ends.
    """

    def __init__(self, first_tokens: float) -> None:
        self._table: Any = np.zeros((4, len(_EDGES)))
        self._passed, self._ended, self._tokens, self._squares = self._table
        self._count = 0
        self._end(first_tokens, 4 / 3 * first_tokens**2)  # of a uniform distribution from 0
        self._passed[: _interval(first_tokens)] = 1.0

    def grew(self, before: int, now: int) -> None:
        """Note that a running request has `now` tokens, after `before`."""
        first, last = _interval(before), _interval(now)
        if last > first:
            self._passed[first:last] += 1.0
            self.__dict__.pop("moments", None)

    def ended(self, tokens: int) -> None:
        """Note that a request has ended or gone, with `tokens` that `grew` has noted."""
        self._end(tokens, tokens**2)

    def _end(self, tokens: float, square: float) -> None:
        interval = _interval(tokens)
        self._ended[interval] += 1.0
        self._tokens[interval] += tokens
        self._squares[interval] += square
        if self._count == MEMORY_REQUESTS:
            self._table *= MEMORY_REQUESTS / (MEMORY_REQUESTS + 1)
        self._count = min(self._count + 1, MEMORY_REQUESTS)
        self.__dict__.pop("moments", None)

    @cached_property
    def moments(self) -> tuple[float, float]:
        """Mean of the lengths, in tokens, and mean of their squares."""
        settled = self._passed + self._ended
        ends = np.divide(
            self._ended, settled, out=np.zeros_like(settled), where=settled > _LEAST_EVIDENCE
        )
        reach = np.concatenate(([1.0], np.cumprod(1.0 - ends)))
        weight = np.divide(reach[:-1] * ends, self._ended, out=np.zeros_like(ends), where=ends > 0)
        # requests that have outlasted all ended ones
        longest = BEYOND * _EDGES[int(np.flatnonzero(settled > _LEAST_EVIDENCE)[-1])]
        mean = weight @ self._tokens + reach[-1] * longest
        square = weight @ self._squares + reach[-1] * 4 / 3 * longest**2
        return float(mean), float(square)


def _interval(tokens: float) -> int:
    """Return the interval of a length; requests without tokens count as in the first."""
    return max(0, bisect_right(_EDGES, tokens) - 1)
