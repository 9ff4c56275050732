"""What clients ask for lately: how often, and how long."""

from __future__ import annotations

import math


class Demand:
    """Exponentially weighted arrival rate and lengths.

    Args:
        window_s: time constant of the arrival rate.
        requests: number of requests over which lengths are averaged.
        prompt_tokens, output_tokens: taken for the lengths until there is one.
    """

    def __init__(
        self, window_s: float = 4.0, requests: int = 50, prompt_tokens: float = 512.0, output_tokens: float = 128.0
    ) -> None:
        self._window_s = window_s
        self._share = 1.0 / requests
        self._rate = 0.0
        self._at_s = -math.inf
        self._prompts = _Mean(self._share)
        self._outputs = _Mean(self._share)
        self._first = (prompt_tokens, output_tokens)

    def arrived(self, prompt_tokens: int, now_s: float) -> None:
        """A request has come."""
        self._rate = self.rate(now_s) + 1.0 / self._window_s
        self._at_s = now_s
        self._prompts.add(prompt_tokens)

    def finished(self, output_tokens: int) -> None:
        """A request has ended by itself."""
        self._outputs.add(max(1, output_tokens))

    def rate(self, now_s: float) -> float:
        """Requests per second."""
        if self._rate == 0.0:
            return 0.0
        return self._rate * math.exp(-max(0.0, now_s - self._at_s) / self._window_s)

    @property
    def prompt_tokens(self) -> float:
        """Mean length of prompts."""
        return self._prompts.value or self._first[0]

    @property
    def output_tokens(self) -> float:
        """Mean length of outputs."""
        return self._outputs.value or self._first[1]


class _Mean:
    """A plain mean at first, a fading one after 1/share values."""

    def __init__(self, share: float) -> None:
        self.value = 0.0
        self._count = 0
        self._share = share

    def add(self, value: float) -> None:
        self._count += 1
        self.value += (value - self.value) * max(1.0 / self._count, self._share)
