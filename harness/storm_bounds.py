"""How far a stream may be from the same request undisturbed: not at all in float32, else as far as
undisturbed degrees are from one another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.streams import WORST_LOGPROB, worst_difference

CHANCE = 2**0.5
"""Each difference is that of two ways to round the same products. A storm has more tokens than its
bounds were found with.
"""

FEWEST_TOKENS = 16
"""Of a stream with a mean: that of one token may be as large as the token's own difference."""


@dataclass(frozen=True)
class Bounds:
    """The largest differences that are right.

    Args:
        logprob: of one token's logprob.
        mean: of the root mean square over a whole stream.
        lead: of the logits plus noise of two tokens, of which either may be sampled.
    """

    logprob: float = WORST_LOGPROB
    mean: float = WORST_LOGPROB
    lead: float = 0.0

    def problem(self, ours: Sequence[float], theirs: Sequence[float]) -> str | None:
        """Say how logprobs of the same tokens differ by too much; None if they do not."""
        worst = worst_difference(ours, theirs)
        if not worst <= self.logprob:
            return f"logprobs differ by {worst}, beyond {self.logprob:.2e}"
        mean = root_mean_square(ours, theirs)
        if len(ours) >= FEWEST_TOKENS and mean > self.mean:
            return f"logprobs differ by {mean} in the mean, beyond {self.mean:.2e}"
        return None


def rounding_bounds(pairs: Iterable[tuple[Sequence[float], Sequence[float]]]) -> Bounds:
    """Return bounds from logprobs of the same streams undisturbed, in pairs of two degrees."""
    both = list(pairs)
    logprob = CHANCE * max(worst_difference(*pair) for pair in both)
    mean = CHANCE * max(root_mean_square(*pair) for pair in both)
    return Bounds(logprob, mean, lead=2 * logprob)


def root_mean_square(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the root of the mean square of the differences; 0.0 of nothing."""
    squares = [(a - b) ** 2 for a, b in zip(ours, theirs, strict=True)]
    return math.sqrt(sum(squares) / max(1, len(squares)))
