"""`auto` with weights that are lent, one long request every 30 s beside short ones: `python -m experiments.lending`.

Decided before the first run: Qwen2.5-32B on four H20, engines of one device, 14.3 GB of activations as for Gyges' page,
0.84 of memory, so that an engine holds 7,120 tokens, a group of four 28,480, and 778,304 with lent weights. Short
requests as in Gyges' section 6.2.4, Poisson, at RATES; a long one of 32,768 tokens and 256 more every 30 s from second
15 on; 300 s, of which short tokens count from 30 s on; three seeds; all is served to its end. *Unpriced*: policies take
weights to be back at once, as before they knew better.

Added when the first results (1, 2 and 3 requests/s) had been seen, in which one group of four is best: 4 and 5
requests/s, and Nemotron-8B on four H200 at 0.17 of memory, whose engines are better apart under load. An engine holds
31,104 tokens, a group of four 124,416.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np

from experiments.common import SEEDS, Numbers
from experiments.gyges_runs import ACTIVATIONS_BYTES, OPTIONS, SHORT
from flying_serving.controller.lending import WeightLending
from flying_serving.sim import hardware, models
from flying_serving.sim.baselines import build
from flying_serving.sim.cluster import Clock
from flying_serving.sim.fleet import feed
from flying_serving.sim.machine import Modelled
from flying_serving.sim.node import SimNode
from flying_serving.sim.requests import SimRequest
from flying_serving.workload.model import Request

PERIOD_S, FIRST_S = 30.0, 15.0
UNTIL_S, WARM_S = 300.0, 30.0
SYSTEMS = ("auto", "unpriced", "gyges", "gyges-round-robin", "gyges-least-load")


@dataclass(frozen=True)
class Case:
    """Devices with a model, prompt and output of long requests, and rates of short ones."""

    model: str
    devices: str
    utilization: float
    activations_bytes: float | None
    long: tuple[int, int]
    rates: tuple[float, ...]

    @property
    def machine(self) -> Modelled:
        """What all systems run on."""
        kind = hardware.parse_devices(self.devices)
        return Modelled(models.load(self.model), kind, self.utilization, self.activations_bytes)


CASES = (
    Case("qwen2.5-32b", "h20x4", 0.84, ACTIVATIONS_BYTES, (32_768, 256), (1.0, 2.0, 3.0, 4.0, 5.0)),
    Case("nemotron-8b", "h200x4", 0.17, None, (131_072, 256), (40.0, 80.0)),
)


def offered(rate_rps: float, seed: int, long: tuple[int, int] | None) -> list[Request]:
    """Short requests, and long ones if there are any."""
    gaps_s: Any = np.random.default_rng([seed, 0]).exponential(size=int(2 * rate_rps * UNTIL_S) + 50) / rate_rps
    rows = [(float(time_s), *SHORT) for time_s in np.cumsum(gaps_s) if time_s < UNTIL_S]
    rows += [(float(time_s), *long) for time_s in np.arange(FIRST_S, UNTIL_S, PERIOD_S)] if long else []
    return [Request(index, *row) for index, row in enumerate(sorted(rows))]


def serve(name: str, case: Case, requests: Sequence[Request]) -> Numbers:
    """What becomes of the requests with one of SYSTEMS."""
    policy = "auto" if name == "unpriced" else name
    node = SimNode(build(policy, case.machine, 1, replace(OPTIONS, lend_weights=True)), clock := Clock(-10.0))
    node.start()
    feed(requests, clock, node.arrive)
    with patch.object(WeightLending, "opens_in_s", lambda *_: {}) if name == "unpriced" else patch.dict({}):
        while clock.step():
            pass
    short, long = (_of(node.outcome.ended, prompt) for prompt, _ in (SHORT, case.long))
    times_s = np.concatenate([np.asarray(one.token_s) for one in short])
    counted = (times_s >= WARM_S) & (times_s < UNTIL_S)
    return {
        "tokens_per_s": float(counted.sum()) / (UNTIL_S - WARM_S),
        "ttft_s": mean(one.first_token_s - one.arrival_s for one in short),
        "e2e_s": mean(one.end_s - one.arrival_s for one in short),
        "long": len(long),
        "long_ttft_s": mean(one.first_token_s - one.arrival_s for one in long) if long else 0.0,
        "loans": len(node.outcome.loans),
        "switches": len(node.outcome.switches),
        "refused": len(node.outcome.refused),
    }


def _of(ended: Sequence[SimRequest], prompt_tokens: int) -> list[SimRequest]:
    return [one for one in ended if one.prompt_tokens == prompt_tokens]


def main() -> None:
    """Print a line for each rate and system: means of the seeds, and short tokens/s beside those without long ones."""
    argparse.ArgumentParser(
        "python -m experiments.lending", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print("rate  system             ratio  TTFT  E2E  long  TTFT  loans switches refused")
    for case, rate_rps in [(one, rate_rps) for one in CASES for rate_rps in one.rates]:
        alone = [serve("auto", case, offered(rate_rps, seed, None)) for seed in SEEDS]
        _show(rate_rps, "auto, no long one", alone, alone)
        for name in SYSTEMS:
            _show(rate_rps, name, [serve(name, case, offered(rate_rps, seed, case.long)) for seed in SEEDS], alone)


def _show(rate_rps: float, name: str, found: Sequence[Numbers], alone: Sequence[Numbers]) -> None:
    ratios = [one["tokens_per_s"] / other["tokens_per_s"] for one, other in zip(found, alone, strict=True)]
    shown = [mean(one[key] for one in found) for key in tuple(found[0])[1:]]
    cells = " ".join(f"{value:6.2f}" for value in shown)
    print(f"{rate_rps:4} {name:18} {mean(ratios):.3f} [{min(ratios):.3f}..{max(ratios):.3f}] {cells}")


if __name__ == "__main__":
    main()
