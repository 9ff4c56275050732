"""What clients ask for lately: how often, and how long."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flying_serving.predict.arrivals import Arrivals
from flying_serving.predict.work import Work

FIRST = 1
"""Weight of the assumed lengths, in requests, against measured ones."""

QUIET_RATE = 0.05
"""Requests per second that are expected when none has come for long, so that the layout suits the next one."""

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
    """Arrival rate, and lengths that fade.

    Args:
        requests: number of requests over which lengths are averaged.
        prompt_tokens, output_tokens: what lengths are taken for at first; a server's first request is
            often a probe, which says little.
    """

    def __init__(self, requests: int = 50, prompt_tokens: float = 512.0, output_tokens: float = 128.0) -> None:
        self._arrivals = Arrivals()
        self._share = 1.0 / requests
        self._prompts = _Mean(prompt_tokens, self._share)
        self._outputs = _Mean(output_tokens, self._share)
        self._caps = _Mean(output_tokens, self._share)
        self._squares = _Mean(4 / 3 * output_tokens**2, self._share)

    def arrived(self, prompt_tokens: int, most_tokens: int, now_s: float) -> None:
        """A request has come that will get `most_tokens` at most."""
        self._caps.add(most_tokens)
        self._arrivals.add(now_s)
        self._prompts.add(prompt_tokens)

    def rate(self, now_s: float) -> float:
        """Requests per second."""
        return self._arrivals.rate(now_s)

    @property
    def usual_rate(self) -> float:
        """Requests per second in the long run."""
        return self._arrivals.usual_rate

    @property
    def burst_s(self) -> float:
        """How long a higher rate than that is expected to go on."""
        return self._arrivals.burst_s

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
        return min(self._outputs.value, self._caps.value)

    @property
    def outputs(self) -> Outputs:
        """Lengths of outputs."""
        mean, known = self.output_tokens, self._outputs.value
        return Outputs(mean, self._squares.value * (mean / known) ** 2)

    def work(self, waiting: int, unfinished_tokens: int, running: int, now_s: float) -> Work:
        """What is to be done: what comes, beside `waiting` requests, prompts that groups have begun, and streams."""
        rate = max(self.rate(now_s), QUIET_RATE)
        lengths = self.prompt_tokens, self.output_tokens
        begun = unfinished_tokens / max(1.0, self.prompt_tokens)
        return Work(rate, *lengths, waiting, running, begun, self.usual_rate, self.burst_s)


class _Mean:
    """A plain mean at first, a fading one after 1/share values."""

    def __init__(self, first: float, share: float) -> None:
        self.value = first
        self._count = FIRST
        self._share = share

    def add(self, value: float) -> None:
        self._count += 1
        self.value += (value - self.value) * max(1.0 / self._count, self._share)
