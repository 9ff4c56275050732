"""Four engines with a tiny model: time until ready beside stock vLLM, and memory with all lanes
beside lane 1 alone.

python -m benchmarks.startup [--rounds 3] [--no-stock]

Memory is the sum of the proportional set sizes of the engine processes after each lane has answered
a request.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median

import httpx
import psutil

from benchmarks.client import prompt
from benchmarks.systems import ROOT, System
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model

ENGINES = "--data-parallel-size=4"
FLAGS = [
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    "--block-size=32",
    "--max-num-seqs=16",
    "--kv-cache-memory-bytes=67108864",
]


def engine_memory_bytes(system: System) -> int:
    """Sum of the proportional set sizes of the server's children that are engines."""
    children = psutil.Process(system.process.pid).children(recursive=True)
    return sum(
        child.memory_full_info().pss
        for child in children
        if "EngineCore" in " ".join(child.cmdline())
    )


def use(system: System, degrees: list[int | None]) -> None:
    """Sixteen requests at each degree, one at a time in each group: all engines use each lane, in
    equal steps.
    """

    def ask(number: int, degree: int | None) -> None:
        body = {
            "model": system.model,
            "prompt": prompt(200, number),
            "max_tokens": 16,
            "ignore_eos": True,
        }
        if degree is not None:
            body["vllm_xargs"] = {"tp_degree": degree}
        httpx.post(f"{system.url}/v1/completions", json=body, timeout=120).raise_for_status()

    for begin, degree in enumerate(degrees):
        with ThreadPoolExecutor(4 // (degree or 1)) as threads:
            list(threads.map(partial(ask, degree=degree), range(16 * begin, 16 * begin + 16)))


def main() -> None:
    """Alternate the servers, print each figure, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-stock", action="store_true", help="memory alone")
    options = parser.parse_args()
    model = make_model(ROOT / ".models" / "llama", "llama")
    ready_s: dict[str, list[float]] = {}
    pss_bytes: dict[str, list[int]] = {}
    servers: list[tuple[str, list[str], bool, list[int | None]]] = [
        ("all lanes", [ENGINES], True, [1, 2, 4]),
        ("lane 1 only", [ENGINES, "--group-sizes=1"], True, [1, 1, 1]),
        ("stock DP 4", [ENGINES], False, [None]),
    ]
    for _ in range(options.rounds):
        for name, flags, ours, degrees in servers:
            if not ours and options.no_stock:
                continue
            system = System(name, model, FLAGS + flags, ours=ours)
            try:
                use(system, degrees)
                ready_s.setdefault(name, []).append(system.ready_s)
                pss_bytes.setdefault(name, []).append(engine_memory_bytes(system))
            finally:
                system.stop()
            print(
                f"{name}: ready in {system.ready_s:.1f} s, {pss_bytes[name][-1] / 2**20:.0f} MiB",
                flush=True,
            )
    lanes = median(pss_bytes["all lanes"]) / median(pss_bytes["lane 1 only"])
    print(f"memory, all lanes / lane 1 only: {lanes:.3f}  bar <= 1.05")
    if not options.no_stock:
        start = median(ready_s["all lanes"]) / median(ready_s["stock DP 4"])
        print(f"time until ready, ours / stock DP 4: {start:.3f}  bar <= 0.60")


if __name__ == "__main__":
    with ended_by_signals():
        main()
