"""What being watched costs: throughput without metrics, with metrics scraped and the page open, and
with a trace.

python -m benchmarks.observability [--rounds 15] [--streams 16] [--tokens 160] [--together]

Three servers with the same flags: `off` with --disable-log-stats; `metrics` scraped every second
while somebody has the live view open, where the server has one; `trace` the same with --trace-out.
One runs at a time, the others are stopped; each round begins with another. A ratio is that of two
runs of the same round, so that what disturbs the machine for longer than a round falls out of it.
Processor time is that of all of the server's processes for each output token.
"""

from __future__ import annotations

import argparse
import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import httpx
import psutil

from benchmarks.client import prompt, run_streams
from benchmarks.systems import ROOT, System, Systems
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model
from flying_serving.config import FlyingConfig

FLAGS = [
    "--data-parallel-size=2",
    "--policy=manual",
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    "--block-size=32",
    "--max-num-seqs=32",
    "--kv-cache-memory-bytes=268435456",
    "--disable-uvicorn-access-log",
]
SCRAPE_S, VIEW_S = 1.0, 1 / 3
"""How often Prometheus and the page ask."""
GOALS = {"metrics": 0.99, "trace": 0.97}
_seeds = itertools.count(1)


@contextmanager
def asked_every(url: str, interval_s: float) -> Iterator[list[int]]:
    """While the body runs, GET the URL so often; yields a list to which each answer's status is
    added.
    """
    done, answers = threading.Event(), list[int]()

    def ask() -> None:
        with httpx.Client(timeout=30) as http:
            while True:
                answers.append(http.get(url).status_code)
                if done.wait(interval_s):
                    return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        done.set()
        thread.join()


def cpu_s(system: System) -> float:
    """Processor seconds that all processes of a server have used."""
    root = psutil.Process(system.process.pid)
    return sum(sum(process.cpu_times()[:2]) for process in (root, *root.children(recursive=True)))


def run(system: System, streams: int, tokens: int) -> tuple[float, float]:
    """Output tokens per second, and processor milliseconds for each."""
    before_s = cpu_s(system)
    _, tokens_per_s = run_streams(
        system.url, system.model, [prompt(64, next(_seeds)) for _ in range(streams)], tokens
    )
    return tokens_per_s, (cpu_s(system) - before_s) * 1e3 / (streams * tokens)


def watched(system: System, streams: int, tokens: int) -> tuple[float, float]:
    """As `run`, while metrics are scraped and the page is open."""
    with (
        asked_every(f"{system.url}/metrics", SCRAPE_S) as scrapes,
        asked_every(f"{system.url}/flying/view", VIEW_S),
    ):
        found = run(system, streams, tokens)
    if set(scrapes) != {200}:
        raise RuntimeError(f"/metrics of {system.name} answered {scrapes}")
    return found


def start_all(systems: Systems, model: Path, trace: Path) -> None:
    """Start every server that this version has."""
    systems.start(System("off", model, [*FLAGS, "--disable-log-stats"], ours=True))
    systems.start(System("metrics", model, FLAGS, ours=True))
    if "trace_out" in FlyingConfig.model_fields:
        systems.start(System("trace", model, [*FLAGS, f"--trace-out={trace}"], ours=True))
    for system in systems.all.values():
        system.resume()
        has_view = httpx.get(f"{system.url}/flying/view", timeout=30).status_code == 200
        system.pause()
        print(
            f"{system.name} is ready, {'with' if has_view else 'WITHOUT'} a live view", flush=True
        )


def report(values: dict[str, list[tuple[float, float]]]) -> None:
    """Print medians, and ratios of runs of the same round with their quartiles."""
    print(
        "\n| server | tokens/s | ratio to off | quartiles | goal | processor ms/token | ratio to "
        "off |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, found in values.items():
        paired = list(zip(found, values["off"], strict=True))
        ratios = sorted(own[0] / off[0] for own, off in paired)
        quarter = len(ratios) // 4
        spread = f"{ratios[quarter]:.3f}..{ratios[-1 - quarter]:.3f}"
        cpu_ratio = median(own[1] / off[1] for own, off in paired)
        tokens_per_s, cpu_ms = (median(values) for values in zip(*found, strict=True))
        goal = f"{GOALS[name]:.2f}" if name in GOALS else ""
        cells = (
            f"{tokens_per_s:.1f}",
            f"{median(ratios):.3f}",
            spread,
            goal,
            f"{cpu_ms:.2f}",
            f"{cpu_ratio:.3f}",
        )
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=160, help="output tokens of each stream")
    parser.add_argument(
        "--together", action="store_true", help="both engines as one group, instead of apart"
    )
    args = parser.parse_args()
    model = make_model(ROOT / ".models" / "llama-75m", "llama-75m")
    values: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with TemporaryDirectory() as directory, Systems() as systems:
        start_all(systems, model, Path(directory) / "trace.json")
        names = list(systems.all)
        for number in range(args.rounds + 1):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                system = systems.all[name]
                system.resume()
                system.layout([[0, 1]] if args.together else [[0], [1]])
                found = (run if name == "off" else watched)(system, args.streams, args.tokens)
                system.pause()
                if number:  # the first round does not count
                    values[name].append(found)
                    print(
                        f"round {number}, {name}: {found[0]:.1f} tokens/s, {found[1]:.2f} ms/token",
                        flush=True,
                    )
        report({name: values[name] for name in names})


if __name__ == "__main__":
    with ended_by_signals():
        main()
