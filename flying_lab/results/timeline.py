"""Series over the time of a replay: tokens per second, requests at a time, phases."""

import itertools
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from flying_lab.results.results import Floats, Ints, Results


@dataclass(frozen=True)
class Stretch:
    """A time in which all arriving requests are of one phase."""

    phase: str
    start_s: float
    end_s: float


def tokens_per_s(results: Results, bin_s: float = 1.0) -> Ints:
    """Return the tokens that came in each bin since the first request was sent, of all requests."""
    if not len(results.event_s):
        return np.zeros(0, dtype=np.int64)
    bins = ((results.event_s - np.nanmin(results.floats("sent_s"))) / bin_s).astype(np.int64)
    return np.bincount(bins, weights=results.event_tokens).astype(np.int64)


def concurrency(results: Results) -> tuple[Floats, Ints]:
    """Return (times, how many requests are under way from then on), a step function over all
    requests that were sent.
    """
    sent, end = results.floats("sent_s"), results.floats("end_s")
    sent, end = sent[~np.isnan(sent)], end[~np.isnan(end)]
    times = np.concatenate([sent, end])
    steps = np.concatenate([np.ones(len(sent), np.int64), -np.ones(len(end), np.int64)])
    order = np.lexsort((-steps, times))
    return times[order], np.cumsum(steps[order])


def stretches(results: Results) -> list[Stretch]:
    """Return the phases in the order of time: each from its first arrival to the first of the next,
    the last to its last.
    """
    arrivals = zip(results.texts("phase"), results.floats("arrival_s").tolist(), strict=True)
    phased = [(phase, at) for phase, at in arrivals if phase is not None]
    found = [
        (phase, [at for _, at in run])
        for phase, run in itertools.groupby(phased, key=itemgetter(0))
    ]
    ends = [times[0] for _, times in found[1:]] + [times[-1] for _, times in found[-1:]]
    return [Stretch(phase, times[0], end) for (phase, times), end in zip(found, ends, strict=True)]
