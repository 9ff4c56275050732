"""Loads of docs/lab/results/loads.md: rare bursts, long prompts beside chat, a day, and three that
were not looked at before.

    python -m experiments.loads_load     the capacities that two of the rates are shares of

The plan, with all of its numbers, is experiments/plans/loads.md.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from experiments.common import DATA, FIRST, MODELS
from experiments.held_out_load import at_once, batched, looped
from experiments.phases_load import AT_ONCE, CAPACITY_RPS, rate_at_once_rps
from flying_lab.workload.model import Workload
from flying_lab.workload.read import read_workload
from flying_lab.workload.synth import Phase, Poisson, Synthesis, synthesise

RARE, MIXTURE, DAY = "rare bursts", "long prompts beside chat", "a day"
SAW, CROWDS, LATER = "saw", "crowds", "azure code, later"
LOADS = (RARE, MIXTURE, DAY, SAW, CROWDS, LATER)
UNSEEN = (SAW, CROWDS, LATER)
TRACE: Path = DATA / "traces" / "azure_code_later.csv"
QUIET_SHARE, RARE_SHARES, PERIOD_S, RARE_S = 0.1, (0.85, 1.2), 300.0, 15.0
LONG_EVERY, LONG_TOKENS, LONG_OUTPUT, MIXTURE_SHARE = 40, 30_000, 256, 0.8
DAY_STEPS, TEETH_STEPS = 40, 10
CROWD, CROWD_SHARE, LATER_SHARE = 32, 0.5, 0.4
LARGE, SMALL = "llama-3-70b", ("gpt-oss-120b", "nemotron-8b")
BURSTS: Mapping[str, int] = {LARGE: 4, **dict.fromkeys(SMALL, 2)}
MIXTURE_S: Mapping[str, float] = {LARGE: 240.0, **dict.fromkeys(SMALL, 120.0)}
DAY_S: Mapping[str, float] = {LARGE: 1200.0, **dict.fromkeys(SMALL, 400.0)}
TOOTH_S: Mapping[str, float] = {LARGE: 100.0, **dict.fromkeys(SMALL, 50.0)}
TEETH: Mapping[str, int] = {LARGE: 4, **dict.fromkeys(SMALL, 2)}
SECONDS: Mapping[str, float] = {LARGE: 300.0, **dict.fromkeys(SMALL, 120.0)}
MIXTURE_RPS: Mapping[str, float] = {LARGE: 7.86, "gpt-oss-120b": 86.5, "nemotron-8b": 51.6}
LATER_RPS: Mapping[str, float] = {LARGE: 16.2, "gpt-oss-120b": 242.0, "nemotron-8b": 159.0}
"""Requests per second of each that stock DP serves if it always has work."""


class Steps(Synthesis):
    """Poisson arrivals whose rate changes in steps, again and again.

    `rates_rps`, `lengths_s`: of each step.
    """

    rates_rps: tuple[float, ...]
    lengths_s: tuple[float, ...]

    def phases(self, rng: np.random.Generator) -> Iterator[Phase]:
        """Yield the steps."""
        for rate_rps, length_s in itertools.cycle(zip(self.rates_rps, self.lengths_s, strict=True)):
            yield Phase(None, rate_rps, length_s)


@cache
def load(name: str, model: str, seed: int) -> Workload:
    """Return the requests of one of LOADS for a model."""
    capacity_rps = CAPACITY_RPS[model]
    match name:
        case "rare bursts":
            shares = [(QUIET_SHARE, PERIOD_S - RARE_S), (RARE_SHARES[0], RARE_S)]
            shares += [(QUIET_SHARE, PERIOD_S - RARE_S), (RARE_SHARES[1], RARE_S)]
            return _steps(capacity_rps, shares, BURSTS[model] * PERIOD_S, seed)
        case "long prompts beside chat":
            rate_rps = MIXTURE_SHARE * MIXTURE_RPS[model]
            return mixed(synthesise(Poisson(rate_rps=rate_rps, duration_s=MIXTURE_S[model]), seed))
        case "a day":
            turns = [2 * math.pi * (step + 0.5) / DAY_STEPS for step in range(DAY_STEPS)]
            shares = [(0.5 - 0.4 * math.cos(turn), DAY_S[model] / DAY_STEPS) for turn in turns]
            return _steps(capacity_rps, shares, DAY_S[model], seed)
        case "saw":
            step_s = TOOTH_S[model] / TEETH_STEPS
            shares = [(0.1 * (step + 1), step_s) for step in range(TEETH_STEPS)]
            return _steps(capacity_rps, shares, TEETH[model] * TOOTH_S[model], seed)
        case "crowds":
            rate_rps = CROWD_SHARE * capacity_rps / CROWD
            crowds = synthesise(Poisson(rate_rps=rate_rps, duration_s=SECONDS[model]), seed)
            return batched(crowds, CROWD)
        case _:
            rate_rps = LATER_SHARE * LATER_RPS[model]
            return looped(read_workload(TRACE, seed), rate_rps, SECONDS[model], seed)


def _steps(
    capacity_rps: float, shares: list[tuple[float, float]], duration_s: float, seed: int
) -> Workload:
    rates = tuple(share * capacity_rps for share, _ in shares)
    lengths_s = tuple(length_s for _, length_s in shares)
    return synthesise(Steps(rates_rps=rates, lengths_s=lengths_s, duration_s=duration_s), seed)


def mixed(chat: Workload) -> Workload:
    """Return chat in which one request of LONG_EVERY, drawn from the seed, has a long prompt."""
    rng = np.random.default_rng([chat.seed, 7])
    is_long = rng.random(len(chat.requests)) < 1 / LONG_EVERY
    return chat.having(
        replace(request, prompt_tokens=LONG_TOKENS, output_tokens=LONG_OUTPUT) if long else request
        for request, long in zip(chat.requests, is_long, strict=True)
    )


def main() -> None:
    """Print the capacities."""
    argparse.ArgumentParser("python -m experiments.loads_load", description=__doc__).parse_args()
    for model in MODELS:
        many = synthesise(Poisson(requests=AT_ONCE[model], rate_rps=1e5), FIRST.seed)
        trace = at_once(read_workload(TRACE, FIRST.seed), AT_ONCE[model])
        found = rate_at_once_rps(model, mixed(many)), rate_at_once_rps(model, trace)
        print(f"{model}: {found[0]:.3g}, {found[1]:.3g} requests/s", flush=True)


if __name__ == "__main__":
    main()
