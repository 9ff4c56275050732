"""The recent demand: arrivals per second, and the lengths of prompts and outputs."""

import math
from dataclasses import dataclass

from flying_serving.predict import lifetimes
from flying_serving.predict.arrivals import Arrivals
from flying_serving.predict.work import Work

FIRST_TOKENS = (512.0, 128.0)
"""Lengths of prompt and output that are expected at first; a server's first request is often a
probe.
"""
MARGIN_TOKENS = 20
"""Added to an expected output: as DynaServe's, against underestimation (section 5 of its paper)."""
_EULER = 0.5772


def expected_outputs(mean: float, most: int, hint: int | None = None) -> int:
    """Return the output tokens that a split is planned for: the client's hint, or the learned mean,
    and a margin.

    A wrong number costs balance between two groups and nothing more.

    Args:
        mean: recent length of outputs (`Demand.output_tokens`).
        most: upper bound of this output.
        hint: the client's expectation (`vllm_xargs: {"expected_tokens": n}`).
    """
    expected = mean if hint is None else hint
    return max(1, min(most, round(expected) + MARGIN_TOKENS))


@dataclass(frozen=True)
class Outputs:
    """Lengths of outputs: their mean, and the mean of their squares."""

    mean: float
    square: float

    def left(self, had: float) -> float:
        """Return the tokens that running requests still get on average, if they have had `had` on
        average.

        Renewal theory: requests that have just begun get the mean. Requests met at random still get
        as much as they have had, square / (2 mean). A line through both is exact for equal, evenly
        spread and exponential lengths.
        """
        of_running = self.square / (2 * self.mean)
        return max(1.0, self.mean + (of_running - self.mean) * min(1.0, had / of_running))

    def longest(self, had: float, count: int) -> float:
        """Return the tokens that the last of `count` running requests to end still gets."""
        if count == 1:
            return self.left(had)
        heavy = min(1.0, max(0.0, self.square / self.mean**2 - 1))
        equal, exponential = 2 * count / (count + 1), math.log(count) + _EULER
        return self.left(had) * max(1.0, (1 - heavy) * equal + heavy * exponential)


class Demand:
    """Arrival rate, and lengths of about the last MEMORY_REQUESTS requests."""

    def __init__(self, first_tokens: tuple[float, float] | None = None) -> None:
        prompt_tokens, output_tokens = first_tokens or FIRST_TOKENS
        self._arrivals = Arrivals()
        self._prompts, self._caps = _Mean(prompt_tokens), _Mean(output_tokens)
        self._lifetimes = lifetimes.Lifetimes(output_tokens)

    def arrived(
        self, prompt_tokens: int, most_tokens: int, now_s: float, event: str | None = None
    ) -> None:
        """Note that a request has arrived that will get at most `most_tokens`, with all others of
        this `event` (see `Events`).
        """
        self._caps.add(most_tokens)
        self._arrivals.add(now_s, event)
        self._prompts.add(prompt_tokens)

    def grew(self, before_tokens: int, output_tokens: int) -> None:
        """Note that a running request has `output_tokens`, after `before_tokens`."""
        self._lifetimes.grew(before_tokens, output_tokens)

    def finished(self, output_tokens: int) -> None:
        """Note that a request has ended or gone, with tokens that `grew` has noted.

        An output that ends at its client's bound counts with its length, as others have bounds too.
        """
        self._lifetimes.ended(max(1, output_tokens))

    @property
    def prompt_tokens(self) -> float:
        """Mean length of prompts, in tokens."""
        return self._prompts.value

    @property
    def output_tokens(self) -> float:
        """Mean length of outputs, in tokens."""
        return min(self._lifetimes.moments[0], self._caps.value)

    @property
    def outputs(self) -> Outputs:
        """Lengths of outputs, in tokens."""
        learned, square = self._lifetimes.moments
        mean = self.output_tokens
        return Outputs(mean, square * (mean / learned) ** 2)

    def work(self, waiting: int, unfinished_tokens: int, running: int, now_s: float) -> Work:
        """Return the work at hand: `waiting` and `running` requests, the rest of begun prompts, and
        the expected arrivals.
        """
        begun = unfinished_tokens / max(1.0, self.prompt_tokens)
        rate, error = self._arrivals.rate_with_error(now_s)
        lengths, usual = (self.prompt_tokens, self.output_tokens), self._arrivals.usual_rate
        return Work(rate, *lengths, waiting, running, begun, usual, error)


class _Mean:
    """A plain mean at first, in which `first` counts as one value; a fading one after
    MEMORY_REQUESTS values.
    """

    def __init__(self, first: float) -> None:
        self.value = first
        self._count = 1

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, lifetimes.MEMORY_REQUESTS)
        self.value += (value - self.value) / self._count
