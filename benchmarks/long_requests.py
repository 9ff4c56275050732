"""Short requests beside a long one every 30 s that no group holds without lent weights, on one live
server with `auto`.

python -m benchmarks.long_requests [--minutes 15] [--other-minutes 3]

Four engines. A long request needs more KV than all of them hold together, so the widest group lends
its weights for it, and they come back when `auto` goes back to narrower groups. Short requests come
at random times, at the same rate all the time; first without long ones, then with them, then
without again. All have to be served. For comparison, a server whose short requests go to the engine
with the least load, and that goes together for each long request and apart when it has ended. What
was sent in the first WARM_UP_S does not count: first requests wait for what is compiled for them.
"""

import argparse
import asyncio
import random
import time
from dataclasses import dataclass
from statistics import median, quantiles

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.client import ANSWER_S, Stream, prompt, stream
from benchmarks.systems import ROOT, System, commit
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model

ENGINES, BLOCK_TOKENS, KV_BYTES = 4, 32, 16 * 2**20
APART, TOGETHER = [[0], [1], [2], [3]], [[0, 1, 2, 3]]
FLAGS = [
    f"--data-parallel-size={ENGINES}",
    "--lend-weights",
    "--dtype=float32",
    "--enforce-eager",
    "--max-num-seqs=16",
    "--max-num-batched-tokens=256",
    "--max-model-len=4096",
    f"--block-size={BLOCK_TOKENS}",
    f"--kv-cache-memory-bytes={KV_BYTES}",
    "--disable-uvicorn-access-log",
]
SHORT_TOKENS, LONG_OUTPUT_TOKENS, MORE_TOKENS = (128, 64), 16, 96
"""Prompt and output of a short request; by how much a long one exceeds what a group holds that
lends nothing.
"""
LONG_EVERY_S, WARM_UP_S, SEED = 30.0, 30.0, 27


@dataclass
class Part:
    """What was sent in one part of the run: all streams, and how many seconds it took until all had
    ended.
    """

    name: str
    short: list[Stream]
    long: list[Stream]
    took_s: float

    def report(self) -> None:
        """Print rates and times."""
        tokens = sum(len(each.token_s) for each in self.short)
        ttft_s, tpot_ms = (
            [each.ttft_s for each in self.short],
            [1e3 * each.tpot_s for each in self.short],
        )
        print(
            f"{self.name}: {len(self.short)} short ones, {tokens / self.took_s:.1f} tokens/s, "
            "TTFT median "
            f"{median(ttft_s):.2f} s, P95 {quantiles(ttft_s, n=20)[-1]:.2f}, TPOT median "
            f"{median(tpot_ms):.1f} ms",
            flush=True,
        )
        if self.long:
            waits_s = [each.ttft_s for each in self.long]
            print(
                f"  {len(self.long)} long ones, TTFT median {median(waits_s):.1f} s, largest "
                f"{max(waits_s):.1f}"
            )


async def run_part(
    system: System,
    name: str,
    seconds: float,
    rate: float,
    long_tokens: int | None,
    *,
    orders: bool = False,
) -> Part:
    """Send requests for some time and wait for all of them. Raises RequestFailed if one fails.

    `orders`: the layout is changed here, for each long request.
    """
    draw, began_s = random.Random(f"{SEED} {name}"), time.monotonic()

    async def later(at_s: float, prompt_tokens: int, output_tokens: int) -> Stream:
        await asyncio.sleep(began_s + at_s - time.monotonic())
        token_ids = prompt(prompt_tokens, draw.getrandbits(32))
        return await stream(client, system.model, token_ids, output_tokens)

    async def order(groups: list[list[int]]) -> None:
        if orders:
            body = {"groups": groups, "mode": "migrate"}
            answer = await client.post("/flying/layout", json=body)
            if answer.status_code != httpx.codes.CONFLICT:  # a later order has taken its place
                answer.raise_for_status()

    async def long_one(at_s: float, prompt_tokens: int) -> Stream:
        await asyncio.sleep(began_s + at_s - time.monotonic())
        await order(TOGETHER)
        done = await later(at_s, prompt_tokens, LONG_OUTPUT_TOKENS)
        done.sent_s = began_s + at_s
        await order(APART)
        return done

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=system.url, limits=limits, timeout=ANSWER_S) as client:
        short, at_s = [], draw.expovariate(rate)
        while at_s < seconds:
            short.append(asyncio.create_task(later(at_s, *SHORT_TOKENS)))
            at_s += draw.expovariate(rate)
        starts_s = [LONG_EVERY_S * (number + 0.5) for number in range(int(seconds / LONG_EVERY_S))]
        long = [
            asyncio.create_task(long_one(start_s, long_tokens - LONG_OUTPUT_TOKENS))
            for start_s in (starts_s if long_tokens is not None else ())
        ]
        streams = await asyncio.gather(*short), await asyncio.gather(*long)
    return Part(name, *streams, time.monotonic() - began_s)


def loans(system: System) -> dict[str, float]:
    """How often weights were lent, and came back, as the metrics count."""
    text = httpx.get(f"{system.url}/metrics", timeout=60).raise_for_status().text
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    names = (
        "flying:weight_loans_total",
        "flying:weight_fetch_seconds_count",
        "flying:weight_fetch_seconds_sum",
    )
    return {sample.name: sample.value for sample in samples if sample.name in names}


def measured(
    system: System, name: str, options: argparse.Namespace, *, minutes: float, long: bool
) -> float:
    """Run a part on a server and print what it shows. Returns the tokens per second of short
    requests.
    """
    status = system.ask("status")
    tokens = status["capacity_tokens"][str(ENGINES)] + MORE_TOKENS if long else None
    part = asyncio.run(
        run_part(system, name, 60 * minutes, options.rate, tokens, orders=system.name == "orders")
    )
    part.report()
    print(f"  {loans(system)}, {len(system.ask('switches')['switches'])} switches", flush=True)
    return sum(len(each.token_s) for each in part.short) / part.took_s


def served(policy: str, name: str) -> System:
    """A server, which is warm."""
    model = make_model(ROOT / ".models" / "llama-75m", "llama-75m")
    return System(name, model, [f"--policy={policy}", *FLAGS], ours=True)


def main() -> None:
    """Run all parts on the one server, then a part on the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=15.0, help="with long requests")
    parser.add_argument(
        "--other-minutes",
        type=float,
        default=3.0,
        help="without any, before and after; in comparison",
    )
    parser.add_argument("--rate", type=float, default=2.0, help="short requests per second")
    parser.add_argument(
        "--systems", nargs="+", choices=["auto", "orders"], default=["auto", "orders"]
    )
    options = parser.parse_args()
    rates: dict[str, float] = {}
    for name in options.systems:
        policy = "auto" if name == "auto" else "manual"
        system = served(policy, name)
        try:
            status = system.ask("status")
            held = status["capacity_tokens"]
            print(
                f"{commit()}, {name}: tokens that groups hold {held}, with lent "
                f"{status['lent_capacity_tokens']}"
            )
            asyncio.run(run_part(system, "warm-up", WARM_UP_S, options.rate, None))
            other = options.other_minutes
            if name == "auto":
                rates["before"] = measured(
                    system, "auto, before", options, minutes=other, long=False
                )
                rates["with"] = measured(
                    system, "auto, with long ones", options, minutes=options.minutes, long=True
                )
                rates["after"] = measured(system, "auto, after", options, minutes=other, long=False)
            else:
                rates["orders"] = measured(
                    system, "together for each long one", options, minutes=other, long=True
                )
            httpx.post(f"{system.url}/flying/check", json={}, timeout=60).raise_for_status()
        finally:
            system.stop()
    if "with" in rates:
        ratio = 2 * rates["with"] / (rates["before"] + rates["after"])
        print(f"short ones beside long ones: {ratio:.3f} of their tokens/s without any (bar 0.95)")
    if {"with", "orders"} <= rates.keys():
        against = rates["with"] / rates["orders"]
        print(f"against together for each long one: {against:.3f} (bar 1.25)")


if __name__ == "__main__":
    with ended_by_signals():
        main()
