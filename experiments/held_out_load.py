"""Loads that no constant of the policy was chosen on, and two that some were: steady arrivals,
batches, other generators, and recorded traces.

    python -m experiments.held_out_load     the capacities that the rates of traces are shares of

The plan, with all of its numbers, is experiments/plans/held_out.md.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from experiments.common import DATA, MODELS
from experiments.phases_load import AT_ONCE, CAPACITY_RPS, rate_at_once_rps
from experiments.servers import MAX_TOKENS
from flying_lab.workload import shape
from flying_lab.workload.model import Request, Workload
from flying_lab.workload.read import read_workload
from flying_lab.workload.synth import Gamma, Phase, Poisson, Synthesis, synthesise

SHARES = (0.1, 0.3, 0.5, 0.7, 0.85)
"""Mean rates of steady arrivals and of batches, as shares of stock DP's capacity."""
OTHER_SHARE = 0.4
"""That of the gamma process and of the traces."""
BATCH = 8
"""Requests of one client that arrive together."""
BURSTINESS = 0.25
"""Shape of the gamma distribution of gaps: their coefficient of variation is 2."""
STATE_SHARES, STATE_S = (0.15, 0.75), (30.0, 20.0)
"""Rates of the two states of the Markov-modulated process, and their mean durations in seconds."""
MEAN_PROMPT, MEAN_OUTPUT = 2064.0, 288.0
"""Means of the lognormal lengths: those of the uniform ones of the other loads."""
MOST_PROMPT = 16_384
"""Tokens at which lognormal prompts and the prompts of traces are cut: every engine holds them."""
SECONDS: Mapping[str, float] = {"llama-3-70b": 300.0, "gpt-oss-120b": 120.0, "nemotron-8b": 120.0}
TRACES: Mapping[str, str] = {
    "azure code": "azure_code.csv",
    "azure conversation": "azure_conversation.csv",
    "mooncake conversation": "mooncake_conversation.jsonl",
}
TRACE_CAPACITY_RPS: Mapping[str, Mapping[str, float]] = {
    "azure code": {"llama-3-70b": 15.3, "gpt-oss-120b": 227.0, "nemotron-8b": 151.0},
    "azure conversation": {"llama-3-70b": 18.2, "gpt-oss-120b": 203.0, "nemotron-8b": 122.0},
    "mooncake conversation": {"llama-3-70b": 2.1, "gpt-oss-120b": 24.1, "nemotron-8b": 14.3},
}
"""Requests per second that stock DP serves of each trace if it always has work."""


class Load(NamedTuple):
    """One load of the page.

    Args:
        family: which generator, or which trace.
        share: its mean rate, as a share of stock DP's capacity for such requests.
    """

    family: str
    share: float

    @property
    def name(self) -> str:
        """Under which its numbers are kept."""
        return f"{self.family}, {self.share:g}"

    @property
    def is_constant(self) -> bool:
        """Whether its mean rate never changes, so that there is nothing to switch for."""
        return self.family in ("steady", "batches", "gamma")

    @property
    def is_held_out(self) -> bool:
        """Whether no constant was chosen on its family (experiments/ablation.py)."""
        return self.family not in ("steady", "azure code")


LOADS = (
    *(Load("steady", share) for share in SHARES),
    *(Load("batches", share) for share in SHARES),
    Load("gamma", OTHER_SHARE),
    Load(
        "modulated",
        round(sum(a * b for a, b in zip(STATE_SHARES, STATE_S, strict=True)) / sum(STATE_S), 2),
    ),
    *(Load(name, OTHER_SHARE) for name in TRACES),
)


class Modulated(Synthesis):
    """Poisson arrivals whose rate changes between two at random (a Markov-modulated process)."""

    rates_rps: tuple[float, float]
    mean_s: tuple[float, float]

    def phases(self, rng: np.random.Generator) -> Iterator[Phase]:
        """Yield both states in turn, each for an exponentially distributed time."""
        for rate_rps, mean_s in itertools.cycle(zip(self.rates_rps, self.mean_s, strict=True)):
            yield Phase(None, rate_rps, rng.exponential(mean_s))


def workload(load: Load, model: str, seed: int) -> Workload:
    """Return the requests of a load for a model."""
    rate_rps, seconds = load.share * CAPACITY_RPS[model], SECONDS[model]
    match load.family:
        case "steady":
            return synthesise(Poisson(rate_rps=rate_rps, duration_s=seconds), seed)
        case "batches":
            return batched(
                synthesise(Poisson(rate_rps=rate_rps / BATCH, duration_s=seconds), seed), BATCH
            )
        case "gamma":
            drawn = Gamma(rate_rps=rate_rps, duration_s=seconds, burstiness=BURSTINESS)
            return _lognormal(synthesise(drawn, seed))
        case "modulated":
            low_rps, high_rps = (share * CAPACITY_RPS[model] for share in STATE_SHARES)
            states = Modulated(rates_rps=(low_rps, high_rps), mean_s=STATE_S, duration_s=seconds)
            return _lognormal(synthesise(states, seed))
    rate_rps = load.share * TRACE_CAPACITY_RPS[load.family][model]
    return looped(read(load.family, seed), rate_rps, seconds, seed)


def batched(drawn: Workload, size: int) -> Workload:
    """Return a workload with a batch of `size` in the place of each request, its lengths drawn
    anew.
    """
    rng = np.random.default_rng([drawn.seed, 6])
    bounds = Poisson(duration_s=1.0)
    count = len(drawn.requests) * size
    prompts = rng.integers(*bounds.prompt_tokens, size=count, endpoint=True).tolist()
    outputs = rng.integers(*bounds.output_tokens, size=count, endpoint=True).tolist()
    return drawn.having(
        Request(index, drawn.requests[index // size].arrival_s, *lengths, event=index // size)
        for index, lengths in enumerate(zip(prompts, outputs, strict=True))
    )


def _lognormal(drawn: Workload) -> Workload:
    """Return a workload with lengths whose coefficient of variation is 1 before they are cut."""
    rng = np.random.default_rng([drawn.seed, 7])
    spread = math.sqrt(math.log(2.0))
    prompts, outputs = (
        np.exp(rng.normal(math.log(mean) - spread**2 / 2, spread, len(drawn.requests)))
        .clip(1, most)
        .astype(int)
        .tolist()
        for mean, most in ((MEAN_PROMPT, MOST_PROMPT), (MEAN_OUTPUT, MAX_TOKENS))
    )
    return drawn.having(
        replace(one, prompt_tokens=prompt, output_tokens=output)
        for one, prompt, output in zip(drawn.requests, prompts, outputs, strict=True)
    )


def looped(trace: Workload, rate_rps: float, seconds: float, seed: int) -> Workload:
    """Return copies of a trace, each begun at another time of it, so many that their time is
    scaled little.
    """
    cycle_s = trace.duration_s
    trace_rps = len(trace.requests) / cycle_s
    copies = max(1, round(rate_rps / trace_rps))
    slower = copies * trace_rps / rate_rps
    starts_s = np.random.default_rng([seed, 8]).uniform(0.0, cycle_s, copies).tolist()
    arrivals = [
        ((one.arrival_s + start_s) % cycle_s * slower, one)
        for start_s in starts_s
        for one in trace.requests
    ]
    arrivals.sort(key=itemgetter(0))
    return trace.having(
        Request(index, at_s, one.prompt_tokens, one.output_tokens)
        for index, (at_s, one) in enumerate(arrivals)
        if at_s < seconds
    )


def read(name: str, seed: int) -> Workload:
    """Return one of TRACES as recorded, its lengths cut. Mooncake's times are rounded; the seed
    spreads them.
    """
    recorded = read_workload(DATA / "traces" / TRACES[name], seed)
    return shape.clip(recorded, MOST_PROMPT, MAX_TOKENS)


def trace_capacity_rps(name: str, model: str) -> float:
    """Return the requests per second that stock DP serves of a trace while it always has work."""
    return rate_at_once_rps(model, at_once(read(name, 1), AT_ONCE[model]))


def at_once(trace: Workload, count: int) -> Workload:
    """Return so many requests with the lengths of a trace, which all arrive at once."""
    lengths = itertools.islice(itertools.cycle(trace.requests), count)
    return trace.having(
        Request(index, 0.0, one.prompt_tokens, one.output_tokens)
        for index, one in enumerate(lengths)
    )


def main() -> None:
    """Print the capacities for the requests of each trace."""
    argparse.ArgumentParser("python -m experiments.held_out_load", description=__doc__).parse_args()
    for name in TRACES:
        for model in MODELS:
            print(f"{name}, {model}: {trace_capacity_rps(name, model):.1f} requests/s", flush=True)


if __name__ == "__main__":
    main()
