"""The load of docs/lab/results/phases.md: low phases that are low, bursts, and the seconds after a
burst as a phase of their own.

    python -m experiments.phases_load      the capacities that the rates are shares of

The plan, with all of its numbers, is experiments/plans/phases.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

from experiments.common import FIRST, MODELS, machine, unbounded
from flying_lab.sim.catalog import build
from flying_lab.sim.cluster import Options
from flying_lab.sim.run import simulate
from flying_lab.workload.model import Workload
from flying_lab.workload.shape import with_after
from flying_lab.workload.synth import Alternating, Poisson, synthesise

LOW_S, BURST_S, AFTER_S = 180.0, 60.0, 20.0
"""Seconds of a low phase and of a burst, and of a low phase's begin that counts apart after one."""
LOW_SHARE, BURST_SHARE = 0.15, 0.85
"""Rates as shares of stock DP's capacity."""
PHASES = ("low", "burst", "after")
OPTIONS = Options(keep_times=False)
"""vLLM's defaults; the times of first and last tokens are enough."""
CAPACITY_RPS: Mapping[str, float] = {
    "llama-3-70b": 10.1,
    "gpt-oss-120b": 121.0,
    "nemotron-8b": 72.4,
}
"""Requests per second that stock DP serves if it always has work: `capacity_rps`."""
BURSTS: Mapping[str, int] = {"llama-3-70b": 4, "gpt-oss-120b": 2, "nemotron-8b": 2}
AT_ONCE: Mapping[str, int] = {"llama-3-70b": 2_000, "gpt-oss-120b": 10_000, "nemotron-8b": 10_000}
"""Requests that arrive together to find the capacity: about four times what the engines run."""


class Span(NamedTuple):
    """One phase, in seconds since the start of the load."""

    phase: str
    start_s: float
    end_s: float


def capacity_rps(model: str) -> float:
    """Return the requests per second of stock DP while it ends the second and the third fifth of
    many that have arrived at once.
    """
    return rate_at_once_rps(
        model, synthesise(Poisson(requests=AT_ONCE[model], rate_rps=1e5), FIRST.seed)
    )


def rate_at_once_rps(model: str, workload: Workload) -> float:
    """Return the rate at which stock DP ends the second and the third fifth of a workload whose
    requests arrive together.
    """
    count = len(workload.requests)
    where = machine(model, FIRST)
    stock = unbounded(build("stock-dp", where, where.smallest_engine, OPTIONS))
    ends = sorted(request.end_s for request in simulate(stock, workload.requests).ended)
    return (3 * count // 5 - count // 5) / (ends[3 * count // 5] - ends[count // 5])


def rates_rps(model: str) -> tuple[float, float]:
    """Return the rates of low phases and of bursts."""
    return CAPACITY_RPS[model] * LOW_SHARE, CAPACITY_RPS[model] * BURST_SHARE


def spans(bursts: int) -> Iterator[Span]:
    """Yield the phases of a load that begins and ends low."""
    for number in range(bursts + 1):
        start_s = number * (LOW_S + BURST_S)
        low_s = start_s
        if number:
            low_s += AFTER_S
            yield Span("after", start_s, low_s)
        yield Span("low", low_s, start_s + LOW_S)
        if number < bursts:
            yield Span("burst", start_s + LOW_S, start_s + LOW_S + BURST_S)


@cache
def load(model: str, seed: int) -> Workload:
    """Return the load of a model: its requests have the names of our phases."""
    low_rps, burst_rps = rates_rps(model)
    return phased(low_rps, burst_rps, BURSTS[model], seed)


def phased(low_rps: float, burst_rps: float, bursts: int, seed: int) -> Workload:
    """Return a load with these rates and this many bursts; lengths as in the paper's section
    6.1.
    """
    *_, last = spans(bursts)
    shape = Alternating(
        low_rate_rps=low_rps,
        burst_rate_rps=burst_rps,
        low_s=LOW_S,
        burst_s=BURST_S,
        duration_s=last.end_s,
    )
    return with_after(synthesise(shape, seed), LOW_S, BURST_S, AFTER_S)


def main() -> None:
    """Print the capacities."""
    argparse.ArgumentParser("python -m experiments.phases_load", description=__doc__).parse_args()
    for model in MODELS:
        print(f"{model}: {capacity_rps(model):.2f} requests/s", flush=True)


if __name__ == "__main__":
    main()
