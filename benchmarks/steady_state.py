"""Each lane beside stock vLLM of the same degree: one run, alternating, ratios with medians and
spread.

python -m benchmarks.steady_state [--rounds 5]
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from pathlib import Path
from statistics import median

from benchmarks.client import prompt, run_streams
from benchmarks.systems import DP, ROOT, TP, System, Systems
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model

FLAGS = [
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    "--block-size=32",
    "--max-num-seqs=32",
    "--kv-cache-memory-bytes=268435456",
    "--disable-uvicorn-access-log",
]
OURS = [DP, "--policy=manual"]
APART, TOGETHER = [[0], [1]], [[0, 1]]
Row = tuple[str, str]
_seeds = itertools.count(1)


def measure_one_stream(system: System) -> tuple[float, float]:
    """Time to first token (s) of 256 and time per token (s) of one stream, the machine otherwise
    idle.
    """
    runs = [
        run_streams(system.url, system.model, [prompt(256, next(_seeds))], 48)[0][0]
        for _ in range(3)
    ]
    return median(r.ttft_s for r in runs), median(r.tpot_s for r in runs)


def measure_throughput(system: System) -> float:
    """Output tokens per second of 16 streams, 64 tokens in and 48 out."""
    return run_streams(system.url, system.model, [prompt(64, next(_seeds)) for _ in range(16)], 48)[
        1
    ]


def start_all(systems: Systems, model: Path) -> list[tuple[str, System, list[list[int]] | None]]:
    """Start every server; returns what to measure: name, server, layout."""
    rows: list[tuple[str, System, list[list[int]] | None]] = []
    for name, flags, ours, plugin in (
        ("stock DP 2", [DP], False, None),
        ("stock TP 2", [TP], False, None),
        ("stock TP 2 gloo", [TP], False, "stock_gloo"),
        ("ours shm", OURS, True, None),
        ("ours gloo", [*OURS, "--cpu-collectives=gloo"], True, None),
    ):
        system = systems.start(System(name, model, FLAGS + flags, ours=ours, plugin=plugin))
        print(f"{name} ready in {system.ready_s:.1f} s", flush=True)
        if ours:
            rows += [(f"lane 1, {name}", system, APART), (f"lane 2, {name}", system, TOGETHER)]
        else:
            rows.append((name, system, None))
    return rows


def measure(
    rows: list[tuple[str, System, list[list[int]] | None]], rounds: int
) -> dict[Row, list[float]]:
    """Every system in turn, `rounds` times after one that does not count."""
    values: dict[Row, list[float]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, system, layout in rows:
            system.resume()
            if layout is not None:
                system.layout(layout)
            ttft_s, tpot_s = measure_one_stream(system)
            tokens_per_s = measure_throughput(system)
            system.pause()
            if number:
                values[name, "ttft_s"].append(ttft_s)
                values[name, "tpot_s"].append(tpot_s)
                values[name, "tokens_per_s"].append(tokens_per_s)
    return values


def report(values: dict[Row, list[float]]) -> None:
    """Absolute figures, then the ratios that matter, each taken round by round."""
    for name in dict.fromkeys(name for name, _ in values):
        cells = [
            f"{what} {median(values[name, what]):8.4g} "
            f"[{min(values[name, what]):.4g}..{max(values[name, what]):.4g}]"
            for what in ("ttft_s", "tpot_s", "tokens_per_s")
        ]
        print(f"{name:20} " + "  ".join(cells))
    for what, ours, base, bar in (
        ("tokens_per_s", "lane 1, ours shm", "stock DP 2", ">= 0.98"),
        ("ttft_s", "lane 2, ours shm", "stock TP 2 gloo", "<= 0.75"),
        ("tpot_s", "lane 2, ours shm", "stock TP 2 gloo", "<= 0.45"),
        ("ttft_s", "lane 2, ours shm", "stock TP 2", "none"),
        ("tpot_s", "lane 2, ours shm", "stock TP 2", "none"),
        ("ttft_s", "lane 2, ours shm", "lane 1, ours shm", "<= 0.60"),
        ("ttft_s", "lane 2, ours gloo", "stock TP 2 gloo", "<= 1.10"),
        ("tpot_s", "lane 2, ours gloo", "stock TP 2 gloo", "<= 1.10"),
    ):
        ratios = [a / b for a, b in zip(values[ours, what], values[base, what], strict=True)]
        print(
            f"{what:13} {ours} / {base}: {median(ratios):.3f} "
            f"[{min(ratios):.3f}..{max(ratios):.3f}]  bar {bar}"
        )


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = make_model(ROOT / ".models" / "llama-75m", "llama-75m")
    with Systems() as systems:
        rows = start_all(systems, model)
        report(measure(rows, options.rounds))


if __name__ == "__main__":
    with ended_by_signals():
        main()
