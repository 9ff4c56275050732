"""What clients ask for lately: how often, and how long."""

from __future__ import annotations

import math

NEAR = 0.5
"""Standard deviations."""
BELIEF = 0.6
"""Share of a sudden change of the rate that is expected to last: much of what looks like a burst is over at once."""


class Demand:
    """Exponentially weighted arrival rate and lengths.

    Args:
        slow_s, fast_s: time constants of two arrival rates. The slow one is believed as long as the fast one is within
            NEAR standard deviations of it: arrivals are random, and not every cluster of them is a burst.
        requests: number of requests over which lengths are averaged.
        prompt_tokens, output_tokens: taken for the lengths until there is one.
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
        self._prompts = _Mean(self._share)
        self._outputs = _Mean(self._share)
        self._first = (prompt_tokens, output_tokens)

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

    @property
    def prompt_tokens(self) -> float:
        """Mean length of prompts."""
        return self._prompts.value or self._first[0]

    @property
    def output_tokens(self) -> float:
        """Mean length of outputs."""
        return self._outputs.value or self._first[1]


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

    def __init__(self, share: float) -> None:
        self.value = 0.0
        self._count = 0
        self._share = share

    def add(self, value: float) -> None:
        self._count += 1
        self.value += (value - self.value) * max(1.0 / self._count, self._share)
