"""`--tbt-slo-ms`: the share of token gaps within the target at 0.8 of capacity, with and without
the flag.

python -m benchmarks.time_between_tokens [--rounds 3] [--seconds 60]

Both servers are ours, two engines apart, and get the same Poisson arrivals in turn; one is stopped
meanwhile. The target is four steps of eight decoding requests of one engine, rounded up to 10 ms.
Capacity: requests per second of 16 that are sent again as soon as they have ended, with the flag.
"""

import argparse
import asyncio
import itertools
import math
import time
from statistics import median

import httpx

from benchmarks.client import (
    ANSWER_S,
    Arrival,
    poisson,
    prompt,
    run_streams,
    serve_arrivals,
    stream,
)
from benchmarks.steady_state import APART, FLAGS, OURS
from benchmarks.systems import ROOT, System, Systems, commit
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 48
STEPS, LOAD, CLOSED = 4, 0.8, 16
_seeds = itertools.count(1)


def decode_step_s(system: System) -> float:
    """Seconds of a step of eight decoding requests on each engine."""
    streams, _ = run_streams(
        system.url, system.model, [prompt(16, next(_seeds)) for _ in range(16)], 64
    )
    return median(each.tpot_s for each in streams)


def capacity(system: System, seconds: float) -> float:
    """Requests per second that end while CLOSED are always under way."""

    async def serve() -> float:
        ended, until_s = 0, time.monotonic() + seconds
        async with httpx.AsyncClient(
            base_url=system.url, limits=httpx.Limits(), timeout=ANSWER_S
        ) as client:

            async def one_after_the_other() -> None:
                nonlocal ended
                while time.monotonic() < until_s:
                    await stream(
                        client, system.model, prompt(PROMPT_TOKENS, next(_seeds)), OUTPUT_TOKENS
                    )
                    ended += time.monotonic() < until_s

            await asyncio.gather(*(one_after_the_other() for _ in range(CLOSED)))
        return ended / seconds

    return asyncio.run(serve())


def main() -> None:
    """Run and print every round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    model = make_model(ROOT / ".models" / "llama-75m", "llama-75m")
    with Systems() as systems:
        without = systems.start(System("without", model, FLAGS + OURS, ours=True))
        without.resume()
        without.layout(APART)
        step_s = decode_step_s(without)
        target_ms = math.ceil(STEPS * step_s * 100) * 10
        without.pause()
        limited = systems.start(
            System("limited", model, [*FLAGS, *OURS, f"--tbt-slo-ms={target_ms}"], ours=True)
        )
        limited.resume()
        limited.layout(APART)
        most = capacity(limited, options.seconds)
        limited.pause()
        print(
            f"{commit()}: step {step_s * 1e3:.0f} ms, target {target_ms} ms, capacity {most:.2f} "
            "requests/s",
            flush=True,
        )
        for number in range(options.rounds):
            times_s = poisson(LOAD * most, options.seconds, number)
            for system in (limited, without) if number % 2 else (without, limited):
                system.resume()
                requests = [
                    Arrival(at_s, prompt(PROMPT_TOKENS, next(_seeds)), OUTPUT_TOKENS)
                    for at_s in times_s
                ]
                streams = serve_arrivals(system.url, system.model, requests)
                system.pause()
                gaps = [b - a for each in streams for a, b in itertools.pairwise(each.token_s)]
                within = sum(gap <= target_ms / 1e3 for gap in gaps) / len(gaps)
                print(
                    f"round {number}, {system.name:8}: {100 * within:.2f} % of {len(gaps)} gaps "
                    "within, longest "
                    f"{max(gaps):.2f} s; TTFT {median(s.ttft_s for s in streams):.2f} s, TPOT "
                    f"{1e3 * median(s.tpot_s for s in streams):.0f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    with ended_by_signals():
        main()
