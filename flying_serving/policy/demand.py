"""What clients ask for lately: how often, and how long."""

from __future__ import annotations

import math
from dataclasses import dataclass

NEAR = 0.5
"""Standard deviations."""
BELIEF = 0.6
"""Share of a sudden change of the rate that is expected to last: much of what looks like a burst is over at once."""
FIRST = 3
"""So many requests count what lengths are taken for before there is any."""

_EULER = 0.5772


@dataclass(frozen=True)
class Outputs:
    """How long outputs are: their mean, and the mean of their squares."""

    mean: float
    square: float

    def left(self, had: float) -> float:
        """Tokens that running requests still get on average, if they have had `had` on average.

        Renewal theory: requests that have just begun get the mean; those that one meets at random still get as much as
        they have had, square / (2 mean). A line through both is exact for equal, evenly spread and exponential lengths.
        """
        of_running = self.square / (2 * self.mean)
        return max(1.0, self.mean + (of_running - self.mean) * min(1.0, had / of_running))

    def longest(self, had: float, count: int) -> float:
        """Tokens that the one of `count` running requests still gets that gets most."""
        if count == 1:
            return self.left(had)
        heavy = min(1.0, max(0.0, self.square / self.mean**2 - 1))
        equal, exponential = 2 * count / (count + 1), math.log(count) + _EULER
        return self.left(had) * max(1.0, (1 - heavy) * equal + heavy * exponential)


class Demand:
    """Exponentially weighted arrival rate and lengths.

    Args:
        slow_s, fast_s: time constants of two arrival rates. The slow one is believed as long as the fast one is within
            NEAR standard deviations of it: arrivals are random, and not every cluster of them is a burst.
        requests: number of requests over which lengths are averaged.
        prompt_tokens, output_tokens: what lengths are taken for at first; a server's first request is
            often a probe, which says little.
    """

    def __init__(
        self,
        slow_s: float = 8.0,
        fast_s: float = 1.0,
        requests: int = 50,
        prompt_tokens: float = 512.0,
        output_tokens: float = 128.0,
    ) -> None:
        self._slow, self._fast = _Rate(slow_s), _Rate(fast_s)
        self._share = 1.0 / requests
        self._prompts = _Mean(prompt_tokens, self._share)
        self._outputs = _Mean(output_tokens, self._share)
        self._squares = _Mean(4 / 3 * output_tokens**2, self._share)

    def arrived(self, prompt_tokens: int, now_s: float) -> None:
        """A request has come."""
        self._slow.count(now_s)
        self._fast.count(now_s)
        self._prompts.add(prompt_tokens)

    def rate(self, now_s: float) -> float:
        """Requests per second."""
        slow, fast = self._slow.value(now_s), self._fast.value(now_s)
        deviation = NEAR * math.sqrt(fast / (2 * self._fast.window_s))
        return slow + BELIEF * (min(max(slow, fast - deviation), fast + deviation) - slow)

    def finished(self, output_tokens: int) -> None:
        """A request has ended by itself."""
        self._outputs.add(max(1, output_tokens))
        self._squares.add(max(1, output_tokens) ** 2)

    @property
    def prompt_tokens(self) -> float:
        """Mean length of prompts."""
        return self._prompts.value

    @property
    def output_tokens(self) -> float:
        """Mean length of outputs."""
        return self._outputs.value

    @property
    def outputs(self) -> Outputs:
        """Lengths of outputs."""
        return Outputs(self._outputs.value, self._squares.value)


class _Rate:
    """Events per second, older ones weighing less."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._rate = 0.0
        self._at_s = 0.0

    def count(self, now_s: float) -> None:
        self._rate = self.value(now_s) + 1.0 / self.window_s
        self._at_s = now_s

    def value(self, now_s: float) -> float:
        return self._rate * math.exp(-max(0.0, now_s - self._at_s) / self.window_s) if self._rate else 0.0


class _Mean:
    """A plain mean at first, a fading one after 1/share values."""

    def __init__(self, first: float, share: float) -> None:
        self.value = first
        self._count = FIRST
        self._share = share

    def add(self, value: float) -> None:
        self._count += 1
        self.value += (value - self.value) * max(1.0 / self._count, self._share)
