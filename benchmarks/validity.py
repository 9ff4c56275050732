"""Does the simulator say what live servers do? Fitted on one workload, compared on another.

python -m benchmarks.policies --case priority --regime link      (steps are learned while this is served)
python -m benchmarks.policies --case load --regime link          (this is what is predicted)
python -m benchmarks.validity --regime link

Reads what those two left in .bench/: the status of the `auto` server after the first, and for each policy the workload
and the summaries of the second. The machine of `flying-serving fit` is made from the status, the workload is simulated
with each policy, and each figure is put beside the median of the live rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.policies import FLAGS, OUT, POLICIES, REGIMES
from flying_serving.sim.baselines import build
from flying_serving.sim.command import run
from flying_serving.sim.live import from_status
from flying_serving.sim.machine import load_measured
from flying_serving.sim.system import Options
from flying_serving.workload.read import read_workload

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


def flag(name: str) -> int:
    """The value that the live servers had."""
    return next(int(word.partition("=")[2]) for word in FLAGS if word.startswith(f"--{name}="))


def live(policy: str, regime: str) -> list[dict[str, Any]]:
    """Summaries of all rounds."""
    found = sorted(OUT.glob(f"{policy}-{regime}-load-*.json"))
    if not found:
        sys.exit(f"no summary of {policy} in regime {regime}: run benchmarks.policies --case load first")
    return [json.loads(path.read_text()) for path in found]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regime", choices=REGIMES, default="link")
    parser.add_argument("--frontend-ms", type=float, default=0.0, help="what the server adds to a first token")
    args = parser.parse_args()
    status = json.loads((OUT / f"status-auto-{args.regime}-priority.json").read_text())
    machine_file = OUT / "machine.json"
    machine_file.write_text(
        from_status(status, "benchmarks.validity", args.frontend_ms / 1e3).model_dump_json(indent=1)
    )
    machine = load_measured(machine_file)
    options = Options(
        slots=flag("max-num-seqs"), budget_tokens=flag("max-num-batched-tokens"), horizon_s=20.0, ttft_weight=10.0
    )
    workload = read_workload(OUT / "load.jsonl")
    console = Console(highlight=False, width=120)
    table = Table(title=f"regime {args.regime}; times in ms; live: median [smallest..largest]", title_style="")
    for heading in ("system", "figure", "live", "simulated", "ratio", "bar"):
        table.add_column(heading, justify="left" if heading in ("system", "figure") else "right")
    for policy in POLICIES:
        rounds = live(policy, args.regime)
        simulated = run(build(policy, machine, 1, options), workload, "measured", console).summary
        for name, (key, bar) in FIGURES.items():
            values = [one[key] for one in rounds]
            ratio = simulated[key] / median(values)
            verdict = "met" if abs(ratio - 1) <= bar else "MISSED"
            spread = f"{median(values):.1f} [{min(values):.1f}..{max(values):.1f}]"
            table.add_row(policy, name, spread, f"{simulated[key]:.1f}", f"{ratio:.2f}", f"{bar:.0%} {verdict}")
    console.print(table)


if __name__ == "__main__":
    main()
