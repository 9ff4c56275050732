"""Policy `auto` beside both fixed layouts on the same workload file, replayed in turn.

python -m benchmarks.policies [--case load|priority] [--regime shm gloo link] [--stock] [--rounds 3]
[--trace FILE]

`load`: quiet phases and bursts. `priority`: a steady load, one request in five is urgent.

The fixed layouts are our server's with the same flags but the policy, so that collectives and
kernels are the same for all; the links of regimes `link` and `bytes` are emulated
(`benchmarks.emulated_link`).
With `--stock` stock vLLM's data and tensor parallelism are measured beside them, with shared memory
or gloo as the regime says, but no tensor parallelism of stock's over a link: its exchanges cannot
be slowed. Each system is stopped while another is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.systems import DP, ROOT, TP, System, Systems, commit
from flying_lab.bench.client import Target
from flying_lab.bench.options import BenchOptions
from flying_lab.bench.replay import measure, probe
from flying_lab.results.metrics import summarise
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model
from flying_lab.workload.files import save
from flying_lab.workload.model import Workload
from flying_lab.workload.read import read_workload
from flying_lab.workload.shape import scale_lengths, scale_time, window, with_priority
from flying_lab.workload.synth import Paper, Poisson, synthesise
from flying_serving.config import FlyingConfig
from flying_serving.predict.work import Objective

STOCK = {"stock-dp": DP, "stock-tp": TP}
SHARED = [
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
FLAGS = [DP, *SHARED]
REGIMES: dict[str, list[str]] = {
    "shm": [],
    "gloo": ["--cpu-collectives=gloo"],
    "link": [],
    "bytes": [],
}
DEFAULT_REGIMES = ("shm", "gloo", "link")
LINKS = {"link": "600,10", "bytes": "30,0.5"}
"""Of our servers in a regime: microseconds and GB/s (`benchmarks.emulated_link`)."""
LENGTHS: dict[str, Any] = {"prompt_tokens": (64, 512), "output_tokens": (16, 96)}
"""Of requests."""
PHASES_S = (40.0, 12.0)
"""How long low and burst are."""
SERVER = FlyingConfig()
OBJECTIVE = Objective(SERVER.horizon_s)
"""A server's by default."""
CASES = ("load", "priority")
POLICIES = ("static-dp", "static-tp", "auto")
OUT = ROOT / ".bench"


def flag(name: str) -> int:
    """The value of a number in FLAGS."""
    return next(int(word.partition("=")[2]) for word in FLAGS if word.startswith(f"--{name}="))


def workloads_of(args: argparse.Namespace) -> dict[str, Workload]:
    """What to replay, by name: the paper's generator at this machine's scale, or a trace; saved
    first.
    """
    if args.trace is not None:
        part = window(read_workload(Path(args.trace)), *args.window)
        found = {
            "trace": scale_time(scale_lengths(part, prompt=args.prompt_scale), args.time_scale)
        }
    elif args.case == "load":
        rates: dict[str, Any] = {
            "low_rate_rps": (0.3, 0.7),
            "burst_rate_rps": (2.0, 4.0),
            "low_s": args.phases[0],
            "burst_s": args.phases[1],
        }
        found = {
            "load": synthesise(
                Paper(requests=None, duration_s=args.seconds, **rates, **LENGTHS), args.seed
            )
        }
    else:
        steady = synthesise(
            Poisson(requests=None, duration_s=args.seconds, rate_rps=args.rate, **LENGTHS),
            args.seed,
        )
        found = {"priority": with_priority(steady, 0.2)}
    for name, workload in found.items():
        save(workload, OUT / f"{name.replace(' ', '-')}.jsonl")
    return found


def replay(system: System, workload: Workload, raw: Path | None = None) -> dict[str, Any]:
    """Summary of one replay, with the switches that it made; `raw`: where the requests' own times
    are kept.
    """
    target, settings = Target(system.url), BenchOptions(token_ids=(300, 499))
    results = measure(workload, target, probe(target, settings), settings)
    if raw is not None:
        results.save(raw)
    summary = summarise(results)
    made = system.ask("switches")["switches"] if system.ours else []
    began_s = time.time() - summary["duration"] - 1
    summary["switches"] = [switch for switch in made if switch["time"] > began_s]
    return summary


def figures(summary: dict[str, Any]) -> dict[str, float]:
    """What the table shows: of each phase and each priority, where there are any, and of the
    whole.
    """
    parts = {
        **summary.get("phases", {}),
        **{f"priority {p}": s for p, s in summary.get("priorities", {}).items()},
    }
    found: dict[str, float] = {}
    for name, part in {**parts, "all": summary}.items():
        found[f"{name} mean TTFT"] = part["mean_ttft_ms"]
        found[f"{name} P90 TTFT"] = part["p90_ttft_ms"]
        found[f"{name} median TPOT"] = part["median_tpot_ms"]
        found[f"{name} mean E2E"] = part["mean_e2el_ms"]
    found["all P99 TTFT"] = summary["p99_ttft_ms"]
    found["tokens/s"] = summary["output_throughput"]
    found["switches"] = float(len(summary["switches"]))
    found["not completed"] = float(summary["failed"] + summary["unfinished"])
    return found


def names_of(regime: str, args: argparse.Namespace) -> list[str]:
    """The systems to compare: policies of ours and, if asked for, stock vLLM."""
    stock = [name for name in STOCK if args.stock and not (regime in LINKS and name == "stock-tp")]
    return [*stock, *(POLICIES if args.policies is None else args.policies)]


def server(name: str, regime: str, model: Path) -> System:
    """Start one of the systems that are compared."""
    if name in STOCK:
        plugin = "stock_gloo" if regime == "gloo" and name == "stock-tp" else None
        return System(f"{name}, {regime}", model, [STOCK[name], *SHARED], ours=False, plugin=plugin)
    flags = [*FLAGS, *REGIMES[regime], f"--policy={name}"]
    return System(f"{name}, {regime}", model, flags, ours=True, link=LINKS.get(regime))


def compare(
    regime: str, model: Path, workloads: dict[str, Workload], args: argparse.Namespace
) -> None:
    """Start the servers of a regime, replay alternately, print medians."""
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    with Systems() as systems:
        for name in names_of(regime, args):
            systems.start(server(name, regime, model))
        for number, system, (kind, workload) in itertools.product(
            range(args.rounds), systems.all.values(), workloads.items()
        ):
            name = f"{system.name}, {kind}"
            file = name.replace(", ", "-").replace(" ", "-")
            system.resume()
            summary = replay(system, workload, OUT / f"{file}-{number}.parquet")
            if system.ours:
                (OUT / f"status-{file}.json").write_text(json.dumps(system.ask("status")))
            system.pause()
            rows[name].append(figures(summary))
            (OUT / f"{file}-{number}.json").write_text(json.dumps(summary, indent=1))
            print(name, {k: round(v, 1) for k, v in rows[name][-1].items()}, flush=True)
    print(
        f"\n{regime}, commit {commit()}: medians [smallest..largest] of {args.rounds}, times in ms"
    )
    for name, found in rows.items():
        cells = []
        for column in found[0]:
            values = [row[column] for row in found]
            cells.append(f"{column} {median(values):.1f} [{min(values):.1f}..{max(values):.1f}]")
        print(f"{name:18s} " + "  ".join(cells), flush=True)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, default="load")
    parser.add_argument("--regime", nargs="+", choices=REGIMES, default=DEFAULT_REGIMES)
    parser.add_argument(
        "--policies", nargs="+", help="other policies than static-dp, static-tp and auto"
    )
    parser.add_argument(
        "--stock", action="store_true", help="beside stock vLLM's data and tensor parallelism"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument(
        "--phases", type=float, nargs=2, default=PHASES_S, help="how long low and burst are, in s"
    )
    parser.add_argument(
        "--rate", type=float, default=1.2, help="requests per second of a steady load"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", help="a trace in place of the generated one")
    parser.add_argument(
        "--window",
        type=float,
        nargs=2,
        default=(0.0, math.inf),
        help="of the trace: from, to, in s",
    )
    parser.add_argument("--time-scale", type=float, default=1.0, help="scale inter-arrival times")
    parser.add_argument("--prompt-scale", type=float, default=1.0, help="scale prompt lengths")
    args = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    workloads = workloads_of(args)
    model = make_model(ROOT / ".models" / "llama-75m", "llama-75m")
    for regime in args.regime:
        compare(regime, model, workloads, args)


if __name__ == "__main__":
    with ended_by_signals():
        main()
