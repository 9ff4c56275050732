"""Lanes that compute in bfloat16: tokens may differ after rounding, and logprobs do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import sqrt

from harness.live import wait_until
from harness.losing import is_whole, kill
from tests.deep.conformance.chapters.lanes import BACK_S
from tests.deep.conformance.live import Answer, Asked, Live

MOST = 1.5
"""Of the difference between stock's degrees 1 and 2: it is that of two ways to round, and so is
ours, by chance.
"""
Logprobs = Mapping[str, list[float]]


def as_near_to_stock_as_stock_is_to_itself(live: Live) -> None:
    """At each degree, of the tokens that requests are forced to emit: others may differ."""
    for degree in live.degrees:
        live.layout(live.groups(degree))
        _require_near(live, degree, [live.run(Asked(job, degree)) for job in live.case.jobs])
    live.check()


def as_near_through_a_loss(live: Live) -> None:
    """An engine is lost under running requests of its group, and is back for the next ones."""
    live.layout(live.groups(2))
    asked = [Asked(job, 2) for job in live.case.jobs]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = [pool.submit(live.run, each) for each in asked]
        wait_until(lambda: live.requests("running") == len(asked), live.status)
        kill(live, 1)
        _require_near(live, 2, [answer.result() for answer in answers])
    wait_until(lambda: is_whole(live), live.log, BACK_S)
    _require_near(live, 2, [live.run(each) for each in asked])
    live.check()


def _require_near(live: Live, degree: int, answers: Sequence[Answer]) -> None:
    """Answers of all jobs have the forced tokens, and logprobs near to stock's of the degree."""
    for job, answer in zip(live.case.jobs, answers, strict=True):
        assert tuple(answer.tokens) == job.request.forced
    names = (job.name for job in live.case.jobs)
    found = dict(zip(names, (answer.logprobs for answer in answers), strict=True))
    between_degrees = difference(_stock(live, 1), _stock(live, 2))
    assert difference(found, _stock(live, degree)) <= MOST * between_degrees, degree


def _stock(live: Live, degree: int) -> Logprobs:
    """Return the logprobs of all jobs, as many as each has tokens."""
    answers = live.case.stock(degree)
    return {job.name: answers[job.name]["logprobs"][: job.max_tokens] for job in live.case.jobs}


def difference(left: Logprobs, right: Logprobs) -> float:
    """Return the root of the mean square."""
    pairs = [pair for name in left for pair in zip(left[name], right[name], strict=True)]
    return sqrt(sum((a - b) ** 2 for a, b in pairs) / len(pairs))
