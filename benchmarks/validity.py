"""Does the simulator say what live servers do? Fitted on one workload, compared on another, round
by round.

python -m benchmarks.validity [--regime link] [--rounds 3] [--seconds 104] [--phases 40 12]

In each round a server serves a load that rises once from few requests to many, in each layout; from
its steps the machine of `flying-serving fit` is made. Then three others, one for each policy, serve
the bursts of `benchmarks.policies --case load`, which are simulated on that machine. Each figure is
put beside the live one of its own round: this machine is now faster and now slower, and a fit knows
only what it has seen. All but one server are stopped (SIGSTOP) at any time.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.policies import (
    FLAGS,
    LENGTHS,
    LINKS,
    OUT,
    PHASES_S,
    POLICIES,
    REGIMES,
    flag,
    replay,
    workloads_of,
)
from benchmarks.systems import ROOT, System, Systems
from flying_lab.cli.simulation import run
from flying_lab.signals import ended_by_signals
from flying_lab.sim.catalog import build
from flying_lab.sim.cluster import Options
from flying_lab.sim.machine import Machine, from_status, load_measured
from flying_lab.tiny_models.checkpoint import make_model
from flying_lab.workload.model import Workload
from flying_lab.workload.synth import Paper, synthesise

FIGURES = {
    "TTFT p50": ("median_ttft_ms", 0.10),
    "TTFT p90": ("p90_ttft_ms", 0.20),
    "TTFT p99": ("p99_ttft_ms", 0.20),
    "TPOT p50": ("median_tpot_ms", 0.10),
    "TPOT p90": ("p90_tpot_ms", 0.20),
    "TPOT p99": ("p99_tpot_ms", 0.20),
    "tokens/s": ("output_throughput", 0.10),
}
"""Name: key of the summary, and by how much the prediction may differ."""
FITTED: dict[str, Any] = {
    "duration_s": 60.0,
    "low_rate_rps": (1.0, 1.0),
    "burst_rate_rps": (3.0, 3.0),
    "low_s": 30.0,
    "burst_s": 30.0,
}
"""What it is fitted on: steps of small batches and of large ones, about as many as the predicted
load makes.
"""
FITTED_SEED = 2
LAYOUTS = ([[0], [1]], [[0, 1]])
"""In which it is fitted: a policy would leave one of them as soon as there are many requests."""

Summary = dict[str, Any]


def fitted_on(status: dict[str, Any], number: int) -> Machine:
    """The machine that `flying-serving fit` makes of a server's status."""
    path = OUT / f"machine-{number}.json"
    path.write_text(from_status(status, "benchmarks.validity", 0.0).model_dump_json(indent=1))
    return load_measured(path)


def served(
    system: System, workload: Workload, groups: list[list[int]] | None = None
) -> tuple[Summary, dict[str, Any]]:
    """The summary of a replay, in this layout if one is given, and the server's status after it."""
    system.resume()
    if groups is not None:
        system.layout(groups)
    summary = replay(system, workload)
    status = system.ask("status")
    system.pause()
    print(
        system.name,
        {name: round(summary[key], 1) for name, (key, _) in FIGURES.items()},
        flush=True,
    )
    return summary, status


def simulated(policy: str, machine: Machine, workload: Workload) -> Summary:
    """What the simulator says of it."""
    options = Options(
        max_num_seqs=flag("max-num-seqs"), max_num_batched_tokens=flag("max-num-batched-tokens")
    )
    return dict(run(build(policy, machine, 1, options), workload, "measured", Console()).summary)


def row(policy: str, name: str, pairs: list[tuple[Summary, Summary]]) -> str:
    """One line of the table: medians over the rounds, and the ratio's range."""
    key, bar = FIGURES[name]
    lived, said = [live[key] for live, _ in pairs], [sim[key] for _, sim in pairs]
    ratios = [s / x for s, x in zip(said, lived, strict=True)]
    ratio = median(ratios)
    verdict = "met" if abs(ratio - 1) <= bar else "MISSED"
    spread = f"{median(lived):.1f} [{min(lived):.1f}..{max(lived):.1f}]"
    ratio_text = f"{ratio:.2f} [{min(ratios):.2f}..{max(ratios):.2f}]"
    return (
        f"| {policy} | {name} | {spread} | {median(said):.1f} | {ratio_text} | {bar:.0%} "
        f"{verdict} |"
    )


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--regime", choices=REGIMES, default="link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=104.0)
    parser.add_argument(
        "--phases", type=float, nargs=2, default=PHASES_S, help="how long low and burst are, in s"
    )
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    fit_on = synthesise(Paper(requests=None, **FITTED, **LENGTHS), FITTED_SEED)
    asked = argparse.Namespace(
        case="load", trace=None, seed=1, seconds=args.seconds, phases=args.phases
    )
    predicted = workloads_of(asked)["load"]
    model = make_model(ROOT / ".models" / "llama-75m", "llama-75m")
    flags, link = [*FLAGS, *REGIMES[args.regime]], LINKS.get(args.regime)
    lived: defaultdict[str, list[Summary]] = defaultdict(list)
    machines: list[Machine] = []
    with Systems() as systems:
        fitted = systems.start(
            System("fitted", model, [*flags, "--policy=manual"], ours=True, link=link)
        )
        compared = {
            policy: systems.start(
                System(policy, model, [*flags, f"--policy={policy}"], ours=True, link=link)
            )
            for policy in POLICIES
        }
        for number in range(args.rounds):
            for groups in LAYOUTS:
                status = served(fitted, fit_on, groups)[1]
            machines.append(fitted_on(status, number))
            for policy, system in compared.items():
                lived[policy].append(served(system, predicted)[0])
                (OUT / f"validity-{policy}-{number}.json").write_text(
                    json.dumps(lived[policy][-1], indent=1)
                )
    print("| system | figure | live (ms) | simulated | ratio | bar |\n|---|---|---|---|---|---|")
    for policy, summaries in lived.items():
        pairs = [
            (live, simulated(policy, machine, predicted))
            for live, machine in zip(summaries, machines, strict=True)
        ]
        for name in FIGURES:
            print(row(policy, name, pairs))


if __name__ == "__main__":
    with ended_by_signals():
        main()
