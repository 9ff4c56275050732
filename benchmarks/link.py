"""What an emulated link makes of a group of two: its first token and its throughput beside two
engines alone.

python -m benchmarks.link [LATENCY_US,GB_PER_S ...] [--rounds 3] [--prompt 256] [--output 128]

The regime `link` of `benchmarks.policies` is to have the shape that the papers report on GPUs:
together halves the time to the first token and gets about 0.75 of the tokens per second of apart.
No engine is warm for a layout before each of both has been measured once.
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from statistics import median

from benchmarks.client import prompt, run_streams
from benchmarks.policies import FLAGS
from benchmarks.systems import ROOT, System
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model

APART, TOGETHER = [[0], [1]], [[0, 1]]
SINGLE, CROWD = 5, 48
_seeds = itertools.count(1)


def measure(system: System, prompt_tokens: int, output_tokens: int) -> tuple[float, float, float]:
    """Medians of one stream's first token and time per token (s), the server idle; tokens per
    second of a crowd.
    """
    alone = [
        run_streams(system.url, system.model, [prompt(prompt_tokens, next(_seeds))], 16)[0][0]
        for _ in range(SINGLE)
    ]
    crowd = [prompt(prompt_tokens, next(_seeds)) for _ in range(CROWD)]
    tokens_per_s = run_streams(system.url, system.model, crowd, output_tokens)[1]
    return median(one.ttft_s for one in alone), median(one.tpot_s for one in alone), tokens_per_s


def compare(link: str, rounds: int, prompt_tokens: int, output_tokens: int) -> None:
    """Start a server with this link, measure both layouts in turn, print the ratios of each
    round.
    """
    model = make_model(ROOT / ".models" / "llama-75m", "llama-75m")
    system = System(f"link {link}", model, [*FLAGS, "--policy=manual"], ours=True, link=link)
    ratios: dict[str, list[float]] = defaultdict(list)
    try:
        for number in range(rounds + 1):
            found = {}
            for name, layout in (("apart", APART), ("together", TOGETHER)):
                system.layout(layout)
                found[name] = measure(system, prompt_tokens, output_tokens if number else 4)
            if number:
                for name, apart, together in zip(
                    ("TTFT", "TPOT", "tokens/s"), *found.values(), strict=True
                ):
                    ratios[name].append(together / apart)
        seen = ", ".join(
            f"{name} {tuple(round(x, 4) for x in values)}" for name, values in found.items()
        )
    finally:
        system.stop()
    cells = [
        f"{name} {median(values):.2f} [{min(values):.2f}..{max(values):.2f}]"
        for name, values in ratios.items()
    ]
    print(f"{link:10} together / apart: {'  '.join(cells)}   last: {seen}", flush=True)


def main() -> None:
    """Compare each link that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("links", nargs="*", metavar="LATENCY_US,GB_PER_S", default=["600,10"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=128)
    args = parser.parse_args()
    for link in args.links:
        compare(link, args.rounds, args.prompt, args.output)


if __name__ == "__main__":
    with ended_by_signals():
        main()
