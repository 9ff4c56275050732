"""Policy `auto` beside both fixed layouts on the same workload file, replayed in turn (use case 1).

python -m benchmarks.load_policy [--regime shm gloo link] [--rounds 3] [--trace FILE]

Every system is our server with the same flags but the policy, so that collectives and kernels are the same for all; the
links of regime `link` are emulated (see docs/architecture.md). Each is stopped while another is measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.systems import ROOT, System, Systems
from flying_serving.bench.client import Target
from flying_serving.bench.metrics import summarise
from flying_serving.bench.run import Settings, measure, probe
from flying_serving.demo.tiny import make_model
from flying_serving.workload.files import save
from flying_serving.workload.model import Workload
from flying_serving.workload.read import read_workload
from flying_serving.workload.synth import Paper, synthesise

FLAGS = [
    "--data-parallel-size=2",
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    "--block-size=32",
    "--max-num-seqs=64",
    "--max-num-batched-tokens=512",
    "--kv-cache-memory-bytes=536870912",
    "--no-enable-prefix-caching",
    "--disable-uvicorn-access-log",
]
REGIMES = {"shm": [], "gloo": ["--cpu-collectives=gloo"], "link": ["--emulate-link=600,1"]}
POLICIES = ("static-dp", "static-tp", "auto")
OUT = ROOT / ".bench"


def workload_of(args: argparse.Namespace) -> Workload:
    """The paper's generator at this machine's scale, or a trace; saved, so that every system replays the same file."""
    if args.trace is not None:
        return read_workload(Path(args.trace))
    paper = Paper(
        requests=None,
        duration_s=args.seconds,
        low_rate_rps=(0.6, 1.4),
        burst_rate_rps=(4.0, 9.0),
        low_s=35.0,
        burst_s=12.0,
        prompt_tokens=(64, 512),
        output_tokens=(16, 96),
    )
    workload = synthesise(paper, args.seed)
    save(workload, OUT / "load_policy.jsonl")
    return workload


def replay(system: System, workload: Workload) -> dict[str, Any]:
    """Summary of one replay, with the switches that it made."""
    target, settings = Target(system.url), Settings(vocabulary=range(300, 500))
    summary = summarise(measure(workload, target, probe(target, settings), settings))
    made = httpx.get(f"{system.url}/flying/switches", timeout=30).json()["switches"]
    began_s = time.time() - summary["duration"] - 1
    summary["switches"] = [switch for switch in made if switch["time"] > began_s]
    return summary


def figures(summary: dict[str, Any]) -> dict[str, float]:
    """What the table shows."""
    low, burst = (summary["phases"].get(phase, summary) for phase in ("low", "burst"))
    return {
        "low mean TTFT": low["mean_ttft_ms"],
        "low median TPOT": low["median_tpot_ms"],
        "burst mean TTFT": burst["mean_ttft_ms"],
        "burst P90 TTFT": burst["p90_ttft_ms"],
        "burst median TPOT": burst["median_tpot_ms"],
        "mean E2E": summary["mean_e2el_ms"],
        "tokens/s": summary["output_throughput"],
        "switches": float(len(summary["switches"])),
        "failed": float(summary["failed"]),
    }


def compare(regime: str, model: Path, workload: Workload, rounds: int) -> None:
    """Start the three servers of a regime, replay alternately, print medians."""
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    with Systems() as systems:
        for policy in POLICIES:
            name = f"{policy}, {regime}"
            systems.start(System(name, model, [*FLAGS, *REGIMES[regime], f"--policy={policy}"], ours=True))
        for number in range(rounds):
            for system in systems.all.values():
                system.resume()
                summary = replay(system, workload)
                system.pause()
                rows[system.name].append(figures(summary))
                name = f"{system.name.replace(', ', '-')}-{number}.json"
                (OUT / name).write_text(json.dumps(summary, indent=1))
                print(system.name, {k: round(v, 1) for k, v in rows[system.name][-1].items()}, flush=True)
    print(f"\n{regime}: medians [smallest..largest] of {rounds}, times in ms")
    for name, found in rows.items():
        cells = []
        for column in found[0]:
            values = [row[column] for row in found]
            cells.append(f"{column} {median(values):.1f} [{min(values):.1f}..{max(values):.1f}]")
        print(f"{name:18s} " + "  ".join(cells), flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--regime", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", help="a saved workload in place of the generated one")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    workload = workload_of(args)
    model = make_model(ROOT / ".models" / "llama-75m", "llama-75m")
    for regime in args.regime:
        compare(regime, model, workload, args.rounds)


if __name__ == "__main__":
    main()
