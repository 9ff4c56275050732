"""Lane 1's time on the host for each step, beside stock vLLM with the same flags, on the CPU.

python -m benchmarks.host_time [--rounds 11] [--steps 400]

The model computes almost nothing, so a step's time is the time of the code around it: API server,
scheduler, worker, and the calls of the model's layers. Ours and stock are measured in turn, and
each round's ratio is of two neighbours. Other servers are stopped meanwhile. No answer is streamed,
so clients take no part in a step.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections import defaultdict
from statistics import median

import httpx

from benchmarks.client import ANSWER_S, prompt
from benchmarks.steady_state import APART, FLAGS
from benchmarks.systems import DP, ROOT, System, Systems, commit
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import Shape, make_model

SHAPE = Shape(hidden=64, intermediate=128, layers=16, heads=2, kv_heads=2)
"""Many layers, each of them tiny: calls of layers count, products do not."""
STREAMS = (1, 16)
PROMPT_TOKENS = 16
BAR = 1.05
PAIRS = {"one engine": [], "two engines": [DP]}
"""The flags of each pair of servers."""
_seeds = itertools.count(1)


async def _answered_in_s(client: httpx.AsyncClient, model: str, streams: int, tokens: int) -> float:
    """Return the seconds until all of some requests, sent at once, are answered."""
    bodies = [
        {
            "model": model,
            "prompt": prompt(PROMPT_TOKENS, next(_seeds)),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0.0,
        }
        for _ in range(streams)
    ]
    began_s = time.monotonic()
    answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    took_s = time.monotonic() - began_s
    for answer in answers:
        answer.raise_for_status()
    return took_s


def step_ms(system: System, streams: int, steps: int) -> float:
    """Return the milliseconds of a step that decodes one token of each stream.

    Requests of one token are taken off: what a request costs once is no part of a step.
    """

    async def measured() -> float:
        async with httpx.AsyncClient(base_url=system.url, timeout=ANSWER_S) as client:
            short_s = await _answered_in_s(client, system.model, streams, 1)
            long_s = await _answered_in_s(client, system.model, streams, 1 + steps)
        return 1e3 * (long_s - short_s) / steps

    return asyncio.run(measured())


def measure(
    pairs: dict[str, tuple[System, System]], rounds: int, steps: int
) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Return (stock, ours) in ms of each round after one that does not count, by pair and streams.

    The two begin a round in turn.
    """
    values: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for number in range(rounds + 1):
        for name, streams in itertools.product(pairs, STREAMS):
            took_ms = {}
            for system in pairs[name][:: 1 if number % 2 else -1]:
                system.resume()
                took_ms[system.ours] = step_ms(system, streams, steps)
                system.pause()
            if number:
                values[name, streams].append((took_ms[False], took_ms[True]))
    return values


def report(values: dict[tuple[str, int], list[tuple[float, float]]]) -> None:
    """Print the times, and the ratios, each of one round."""
    for (name, streams), rows in values.items():
        stock, ours = zip(*rows, strict=True)
        ratios = [ours_ms / stock_ms for stock_ms, ours_ms in rows]
        print(
            f"{name}, {streams:2} streams: stock {median(stock):.3f} ms a step "
            f"[{min(stock):.3f}..{max(stock):.3f}], ours {median(ours):.3f} "
            f"[{min(ours):.3f}..{max(ours):.3f}], ratio {median(ratios):.3f} "
            f"[{min(ratios):.3f}..{max(ratios):.3f}], bar {BAR}"
        )


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=400, help="tokens of each request")
    options = parser.parse_args()
    model = make_model(ROOT / ".models" / "host-time", SHAPE)
    with Systems() as systems:
        pairs = {}
        for name, flags in PAIRS.items():
            stock = systems.start(System(f"stock {name}", model, FLAGS + flags, ours=False))
            ours_flags = [*FLAGS, *flags, "--policy=manual"]
            ours = systems.start(System(f"ours {name}", model, ours_flags, ours=True))
            if DP in flags:
                ours.resume()
                ours.layout(APART)
                ours.pause()
            pairs[name] = (stock, ours)
        print(f"{commit()}: {options.rounds} rounds of {options.steps} steps", flush=True)
        report(measure(pairs, options.rounds, options.steps))


if __name__ == "__main__":
    with ended_by_signals():
        main()
