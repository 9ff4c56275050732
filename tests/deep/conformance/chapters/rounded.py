"""Lanes that compute in bfloat16: tokens may differ after rounding, and logprobs do."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

from tests.deep.conformance.live import Asked, Live

MOST = 1.5
"""Of the difference between stock's degrees 1 and 2: it is that of two ways to round, and so is
ours, by chance.
"""
Logprobs = Mapping[str, list[float]]


def as_near_to_stock_as_stock_is_to_itself(live: Live) -> None:
    """At each degree, of the tokens that requests are forced to emit: others may differ."""
    between_degrees = difference(_stock(live, 1), _stock(live, 2))
    for degree in live.degrees:
        live.layout(live.groups(degree))
        found = {}
        for job in live.jobs(degree):
            tokens, found[job.name] = live.run(Asked(job, degree))
            assert tuple(tokens) == job.request.forced
        assert difference(found, _stock(live, degree)) <= MOST * between_degrees, degree
    live.check()


def _stock(live: Live, degree: int) -> Logprobs:
    """Return the logprobs of all jobs, as many as each has tokens."""
    answers = live.case.stock(degree)
    return {job.name: answers[job.name]["logprobs"][: job.max_tokens] for job in live.case.jobs}


def difference(left: Logprobs, right: Logprobs) -> float:
    """Return the root of the mean square."""
    pairs = [pair for name in left for pair in zip(left[name], right[name], strict=True)]
    return sqrt(sum((a - b) ** 2 for a, b in pairs) / len(pairs))
