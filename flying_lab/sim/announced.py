"""The lengths of outputs that clients of a simulated server announce (`expected_tokens`).

- `exact`: without error.
- `error-20`, `error-40`: times a log-normal factor of median 1, whose logarithm has a deviation of
  0.2 or 0.4, drawn anew for each request.
- `production`: none, so that the server has only what it has learned from earlier requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from flying_lab.sim.node import System
from flying_lab.workload.model import Request

Source = Literal["exact", "error-20", "error-40", "production"]
Hint = Callable[[Request], int]
"""Returns the output tokens that a client announces for its request."""
DEVIATIONS: Mapping[Source, float] = {"exact": 0.0, "error-20": 0.2, "error-40": 0.4}
"""Of the logarithm of the factor by which clients are wrong."""


def exact(request: Request) -> int:
    """Return the length of an output."""
    return request.output_tokens


def hint_of(source: Source, seed: int) -> Hint | None:
    """Return what clients announce; None if they announce nothing. Errors follow from the seed and
    the request's number.
    """
    deviation = DEVIATIONS.get(source)
    if not deviation:
        return None if deviation is None else exact

    def wrong(request: Request) -> int:
        drawn = np.random.default_rng([seed, request.index]).standard_normal()
        return max(1, round(request.output_tokens * math.exp(deviation * drawn)))

    return wrong


def announcing(system: System, source: Source, seed: int, most_tokens: int) -> System:
    """Return a system whose clients announce lengths as `source` says.

    They ask for `most_tokens` output tokens at most, which says nothing of a length.
    """
    return replace(system, hint=hint_of(source, seed), max_tokens=lambda _: most_tokens)
