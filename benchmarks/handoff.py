"""What a migration of KV costs: time for a token that is pulled, and token gaps of streams that
migrate or do not.

python -m benchmarks.handoff [--rounds 10]

Four engines, one stream on each. Two engines go together by `migrate`, and apart again: their
streams migrate, and the other two engines take no part. A gap is the longest time between two
tokens of a stream after a switch, in medians of the time between its tokens in the same round;
`control` is that of all streams in a time as long before the first switch: engines that share
processors have long gaps without any switch. The time for a token is what the server has measured
at its start, by size of the group that the KV goes to.
"""

import argparse
import asyncio
import time
from itertools import pairwise
from statistics import median

import httpx

from benchmarks.client import ANSWER_S, Stream, prompt, stream
from benchmarks.systems import ROOT, System, commit
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model

FLAGS = [
    "--policy=manual",
    "--data-parallel-size=4",
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    "--block-size=32",
    "--max-num-seqs=32",
    "--kv-cache-memory-bytes=268435456",
    "--disable-uvicorn-access-log",
]
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 160
APART, PAIR = [[0], [1], [2], [3]], [[0, 1], [2], [3]]
AROUND_S = 1.5
"""After all prompts, before the first switch; and after each."""


async def run_round(system: System, number: int) -> tuple[list[Stream], list[float]]:
    """Streams of engines 0 to 3; when the control began, and when each switch was ordered."""
    async with httpx.AsyncClient(
        base_url=system.url, limits=httpx.Limits(), timeout=ANSWER_S
    ) as client:

        async def order(groups: list[list[int]], mode: str) -> None:
            answer = await client.post("/flying/layout", json={"groups": groups, "mode": mode})
            answer.raise_for_status()

        await order(APART, "weave")
        streams = []
        for engine in range(4):
            token_ids, began = prompt(PROMPT_TOKENS, 4 * number + engine), asyncio.Event()
            sent = stream(client, system.model, token_ids, OUTPUT_TOKENS, began=began)
            streams.append(asyncio.create_task(sent))
            await asyncio.wait_for(began.wait(), ANSWER_S)  # the next one goes to another engine
        begun_s = [time.monotonic()]
        await asyncio.sleep(AROUND_S)
        for groups in (PAIR, APART):
            begun_s.append(time.monotonic())
            await order(groups, "migrate")
            await asyncio.sleep(AROUND_S)
        return list(await asyncio.gather(*streams)), begun_s


def worst_gaps(streams: list[Stream], begun_s: list[float]) -> list[float]:
    """Of each stream the longest gap in AROUND_S from each of some times on, in medians of the
    stream's.
    """
    found = []
    for each in streams:
        gaps = list(pairwise(each.token_s))
        usual_s = median(b - a for a, b in gaps)
        for at_s in begun_s:
            around = [b - a for a, b in gaps if b > at_s and a < at_s + AROUND_S]
            if around:
                found.append(max(around) / usual_s)
    return found


def main() -> None:
    """Run all rounds and print each, then medians and the largest."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    system = System(
        "ours", make_model(ROOT / ".models" / "llama-75m", "llama-75m"), FLAGS, ours=True
    )
    try:
        costs = system.ask("status")["migration_cost"]
        shown = ", ".join(f"{size}: {1e6 * cost['token_s']:.1f}" for size, cost in costs.items())
        print(f"{commit()}: microseconds for a token, by engines: {shown}", flush=True)
        migrating, apart, control = list[float](), list[float](), list[float]()
        for number in range(options.rounds):
            streams, (begun_s, *ordered_s) = asyncio.run(run_round(system, number))
            mine, others = worst_gaps(streams[:2], ordered_s), worst_gaps(streams[2:], ordered_s)
            before = worst_gaps(streams, [begun_s])
            migrating, apart, control = migrating + mine, apart + others, control + before
            step_ms = 1e3 * median(each.tpot_s for each in streams)
            print(
                f"round {number}: token {step_ms:.1f} ms; worst gap of streams that migrate "
                f"{max(mine):.2f}, "
                f"of the others {max(others):.2f}, of all before {max(before):.2f}",
                flush=True,
            )
        for name, gaps in (("migrate", migrating), ("others", apart), ("control", control)):
            print(
                f"{name}: {len(gaps)} gaps, median {median(gaps):.2f}, largest {max(gaps):.2f} "
                "of a usual one"
            )
        counts = [engine["migrations"] for engine in system.ask("status")["engines"]]
        print(f"migrations by engine: {counts}")
    finally:
        system.stop()


if __name__ == "__main__":
    with ended_by_signals():
        main()
