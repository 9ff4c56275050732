"""The error of forecasts of layouts beside each other, where the arrivals are known.

    python -m experiments.forecast_errors      each load and layout, and the root of the mean square

Poisson arrivals last as long as the horizon of a forecast, and begin on an idle server. Each layout
of our server is kept for a run. What its requests took together is compared with the forecast of
it, with the rate and the mean lengths of that load. A ratio counts as its distance to the mean of
all layouts: policies compare layouts, and an error of all of them changes no choice. The result, to
a hundredth, is `flying_serving.policy.policies.FORECAST_ERROR`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from statistics import mean

from experiments import servers
from experiments.common import MODELS, Setting
from experiments.phases_load import CAPACITY_RPS, OPTIONS
from experiments.servers import GRAPHS
from flying_lab.sim.fleet import Fleet
from flying_lab.workload.model import Workload
from flying_lab.workload.synth import Poisson, synthesise
from flying_serving.config import FlyingConfig
from flying_serving.predict.forecast import evaluate
from flying_serving.predict.work import Objective, Work

SHARES = (0.15, 0.6, 0.85, 1.2, 1.7)
"""Rates, as shares of stock DP's capacity."""
SEEDS = (1, 2, 3)
HORIZON_S = FlyingConfig().horizon_s


def loads(model: str, share: float) -> list[Workload]:
    """Return one load for each seed."""
    rate_rps = share * CAPACITY_RPS[model]
    poisson = Poisson(requests=None, rate_rps=rate_rps, duration_s=HORIZON_S)
    return [synthesise(poisson, seed) for seed in SEEDS]


def ratio(model: str, degree: int, workload: Workload) -> float:
    """Return the request-seconds that a layout needs, over their forecast."""
    setting = Setting(workload.seed)
    devices = servers.degrees(model, setting)[0]
    fixed = servers.static(degree, devices)
    fleet = Fleet(servers.ours(GRAPHS, fixed, model, setting, OPTIONS))
    fleet.run(workload.requests)
    needed_s = sum(one.end_s - one.arrival_s for one in fleet.outcome().ended)
    state = fleet.nodes[0].controller.state
    requests = workload.requests
    work = Work(
        len(requests) / HORIZON_S,
        mean(one.prompt_tokens for one in requests),
        mean(one.output_tokens for one in requests),
        0.0,
    )
    return needed_s / evaluate(state.layout, state.lane_figures(), work, Objective(HORIZON_S))


def ratios() -> Iterator[tuple[str, float, dict[int, float]]]:
    """Yield model, share and the mean ratio of each degree."""
    for model in MODELS:
        for share in SHARES:
            every = loads(model, share)
            yield (
                model,
                share,
                {
                    degree: mean(ratio(model, degree, one) for one in every)
                    for degree in servers.degrees(model, Setting(SEEDS[0]))
                },
            )


def main() -> None:
    """Print all ratios and the error of forecasts beside each other."""
    command = "python -m experiments.forecast_errors"
    argparse.ArgumentParser(command, description=__doc__).parse_args()
    distances = []
    for model, share, found in ratios():
        middle = mean(found.values())
        distances += [one / middle - 1 for one in found.values()]
        shown = ", ".join(f"degree {degree}: {one:.3f}" for degree, one in found.items())
        print(f"{model}, {share:g} of capacity: {shown}", flush=True)
    error = math.sqrt(mean(one**2 for one in distances))
    print(f"forecasts are off by {error:.1%} beside each other")


if __name__ == "__main__":
    main()
