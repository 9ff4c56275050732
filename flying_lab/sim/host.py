"""The host's work for a step: when devices wait for it.

Modelled devices have async scheduling, vLLM's default on CUDA: a step is planned and launched while
the one before runs. Devices then wait only if the work of one thread takes longer than a step.
Where an engine turns to another lane, the step before is over first, so the devices wait for the
scheduler.

All figures are of `python -m benchmarks.group_host`, ours and stock vLLM's on the same two cores:
lines through the medians for 1 and for 256 requests of a tiny model (docs/lab/results.md, `host`).
They stand as they are for the hosts of modelled devices: no part of them is the model's
arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class HostTime:
    """Seconds that grow with the requests in a step."""

    fixed_s: float = 0.0
    request_s: float = 0.0

    def seconds(self, requests: int) -> float:
        """Return the seconds for a step with so many requests."""
        return self.fixed_s + self.request_s * requests

    def __mul__(self, share: float) -> Self:
        """Return a share of this time."""
        return type(self)(self.fixed_s * share, self.request_s * share)


NO_TIME = HostTime()


@dataclass(frozen=True)
class Host:
    """What the host adds to steps of a server.

    `busy`: work of the busiest thread for a step, below which no step is. `in_order`: from the end
    of a step to the begin of the next one where that is planned when the first is over; stock vLLM,
    which has one lane, is never charged it.
    """

    busy: HostTime
    in_order: HostTime = NO_TIME

    def __mul__(self, share: float) -> Self:
        """Return a host with a share of this work."""
        return type(self)(self.busy * share, self.in_order * share)


OURS_ALONE = Host(HostTime(530e-6, 19.7e-6), HostTime(180e-6, 17.5e-6))
"""An engine alone: scheduler and model runner are one thread."""
OURS_GROUP = Host(HostTime(640e-6, 21.0e-6), HostTime(520e-6, 21.2e-6))
"""A group of ours: the leader's thread is scheduler and member."""
STOCK_ALONE = Host(OURS_ALONE.busy)
"""An engine of stock's data parallelism. On CUDA it is one process, as ours is; on the CPU, where
this was measured, it has a worker beside it. So its work is taken from ours.
"""
STOCK_TENSOR = Host(HostTime(647e-6, 10.6e-6))
"""Stock's tensor parallelism: the longer of scheduler and model runner, two processes."""


def host_of(size: int, degree: int) -> Host:
    """Return the host of a step of a degree, by the size of our group; 0: stock vLLM."""
    if size:
        return OURS_GROUP if size > 1 else OURS_ALONE
    return STOCK_TENSOR if degree > 1 else STOCK_ALONE
