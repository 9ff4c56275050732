"""The thresholds of the operator of the simulated fork, by the rule of the plan
experiments/plans/fork_thresholds.md.

    python -m experiments.fork_thresholds      the mean E2E of each pair, by model

They are found with a seed that no page reports, on a load of phases that no layout is too slow for.
"""

from __future__ import annotations

import argparse
from statistics import mean

from experiments import servers
from experiments.common import MAX_NUM_SEQS, MODELS, Setting
from experiments.phases_load import phased, rates_rps
from flying_lab.sim.baselines.release import Thresholds
from flying_lab.sim.catalog import operated
from flying_lab.sim.cluster import Options
from flying_lab.sim.run import simulate
from flying_lab.workload.model import Workload

SEED = 11
BURSTS = 2
PAIRS = (
    Thresholds(0, 0),
    *(Thresholds(joined, times * joined) for joined in (4, 16, 64, 256) for times in (2, 4, 8)),
)


def load(model: str) -> Workload:
    """Return low phases and bursts at 0.15 and 0.85 of stock DP's capacity."""
    return phased(*rates_rps(model), BURSTS, SEED)


def mean_e2e_s(thresholds: Thresholds, model: str, workload: Workload) -> float:
    """Return the mean end-to-end latency of the fork with these thresholds."""
    options = Options(max_num_seqs=MAX_NUM_SEQS, keep_times=False)
    fork = servers.stock("fork", model, Setting(SEED), options)
    ended = simulate(operated(fork, thresholds), workload.requests).ended
    return mean(one.end_s - one.arrival_s for one in ended)


def main() -> None:
    """Print all pairs."""
    command = "python -m experiments.fork_thresholds"
    argparse.ArgumentParser(command, description=__doc__).parse_args()
    for model in MODELS:
        workload = load(model)
        for pair in PAIRS:
            print(f"{model} {pair}: {mean_e2e_s(pair, model, workload):.2f} s", flush=True)


if __name__ == "__main__":
    main()
