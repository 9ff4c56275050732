"""KV of running requests that changes its layout in place, on engines whose KV memory is nearly
full (Gyges, 4.2).

python -m benchmarks.transform [--kv 0.9] [--rounds 8]

Four engines, two streams on each, which fill a share of its KV memory. All go to one group by
`migrate`, back, and into one group again; then they leave one by one. Each request is larger than
what is free on an engine, as it is on one and as a share of it in the group, so it has to come in
chunks.

Extra memory is what requests hold on engine 0, which leads the group, in the middle of a change,
beyond what they held when it was ordered. Bytes are those that an engine copied in the trace, and
what they should be: its share of the heads of every token that came. Steps of the group with KV
pulled before them are compared with steps without, of as many requests: `step` is the step by
itself, `with pull` is from the end of the step before.
"""

import argparse
import asyncio
import json
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.client import ANSWER_S, prompt, stream
from benchmarks.systems import ROOT, System, commit
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model

ENGINES, STREAMS, KV_BYTES, MIB = 4, 8, 256 * 2**20, 2**20
FLAGS = [
    "--policy=manual",
    f"--data-parallel-size={ENGINES}",
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=8192",
    "--block-size=32",
    "--max-num-seqs=16",
    f"--kv-cache-memory-bytes={KV_BYTES}",
    "--no-enable-prefix-caching",
    "--disable-uvicorn-access-log",
]
APART, TOGETHER = [[0], [1], [2], [3]], [[0, 1, 2, 3]]
SETTLED_S, MIGRATED_S = 0.5, 30.0
"""After a change, and the longest that one may take."""


@dataclass
class Change:
    """One change of the layout with all streams: when it was ordered and over, and blocks in use on
    engine 0 before.

    `again`: requests that were prefilled again.
    """

    groups: list[list[int]]
    blocks_before: int
    ordered_s: float
    over_s: float = 0.0
    again: int = 0


@dataclass
class Seen:
    """What the rounds have done; `alone_s`: spans in which steps of the group had no KV pulled
    between them.
    """

    changes: list[Change] = field(default_factory=list)
    alone_s: list[tuple[float, float]] = field(default_factory=list)


def blocks_in_use(system: System) -> int:
    """On engine 0, by its metrics."""
    text = httpx.get(f"{system.url}/metrics", timeout=60).raise_for_status().text
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    (usage,) = [
        sample.value
        for sample in samples
        if sample.name == "vllm:kv_cache_usage_perc" and sample.labels["engine"] == "0"
    ]
    return round(usage * (system.ask("status")["engines"][0]["blocks"] - 1))


def migrated(system: System) -> tuple[int, int]:
    """Requests that have come with their KV, and without."""
    counts = [engine["migrations"] for engine in system.ask("status")["engines"]]
    return sum(each["migrated"] for each in counts), sum(each["prefilled_again"] for each in counts)


async def change(client: httpx.AsyncClient, system: System, groups: list[list[int]]) -> Change:
    """Order a layout by `migrate`, and wait until all streams have come. Raises TimeoutError if
    they do not.
    """
    before = await asyncio.to_thread(migrated, system)
    made = Change(groups, await asyncio.to_thread(blocks_in_use, system), time.monotonic())
    (
        await client.post("/flying/layout", json={"groups": groups, "mode": "migrate"})
    ).raise_for_status()
    while sum(await asyncio.to_thread(migrated, system)) < sum(before) + STREAMS:
        if time.monotonic() > made.ordered_s + MIGRATED_S:
            raise TimeoutError(f"not all of {STREAMS} streams have come in {MIGRATED_S:g} s")
        await asyncio.sleep(0.02)
    made.over_s = time.monotonic()
    made.again = (await asyncio.to_thread(migrated, system))[1] - before[1]
    await asyncio.sleep(SETTLED_S)
    return made


async def run_round(system: System, number: int, prompt_tokens: int, seen: Seen) -> None:
    """Streams of engines 0 to 3 go together, apart, together, and end one by one."""
    async with httpx.AsyncClient(
        base_url=system.url, limits=httpx.Limits(), timeout=ANSWER_S
    ) as client:
        (
            await client.post("/flying/layout", json={"groups": APART, "mode": "weave"})
        ).raise_for_status()
        begun = [asyncio.Event() for _ in range(STREAMS)]
        streams = [
            asyncio.create_task(
                stream(
                    client,
                    system.model,
                    prompt(prompt_tokens, STREAMS * number + index),
                    2000,
                    began=event,
                )
            )
            for index, event in enumerate(begun)
        ]
        for event in begun:
            await asyncio.wait_for(event.wait(), ANSWER_S)
        for groups in (TOGETHER, APART, TOGETHER):
            seen.changes.append(await change(client, system, groups))
        began_s = time.monotonic()
        for each in streams:
            await asyncio.sleep(SETTLED_S)
            each.cancel()
        seen.alone_s.append((began_s, time.monotonic()))
        await asyncio.gather(*streams, return_exceptions=True)


def events_of(trace: list[dict[str, Any]], engine: int, kind: str) -> list[dict[str, Any]]:
    """What an engine did, in order: `pull` or `step`."""
    (row,) = {
        each["tid"]
        for each in trace
        if each["name"] == "thread_name" and each["args"]["name"] == f"engine {engine}"
    }
    return sorted(
        (each for each in trace if each.get("cat") == kind and each["tid"] == row),
        key=lambda each: each["ts"],
    )


def steps(
    trace: list[dict[str, Any]], seen: Seen
) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """Steps of the group on engine 0, `with` KV pulled before them and `without`, by number of
    requests.

    Milliseconds of the step, and from the end of the step before. Steps with prompt tokens do not
    count.
    """
    found: dict[str, dict[int, list[tuple[float, float]]]] = {
        key: defaultdict(list) for key in ("with", "without")
    }
    both = sorted(
        events_of(trace, 0, "step") + events_of(trace, 0, "pull"), key=lambda each: each["ts"]
    )
    last, pulled = None, False
    for each in both:
        if each["cat"] == "pull":
            pulled = True
            continue
        of = each["args"]
        if (
            last is not None
            and of["lane"] == last["args"]["lane"] == ENGINES
            and not of["prefill_tokens"]
        ):
            alone = any(a <= each["ts"] / 1e6 <= b for a, b in seen.alone_s)
            took = each["dur"] / 1e3, (each["ts"] + each["dur"] - last["ts"] - last["dur"]) / 1e3
            if pulled or alone:
                found["with" if pulled else "without"][of["requests"]].append(took)
        last, pulled = each, False
    return found


def report(
    trace: list[dict[str, Any]], seen: Seen, tokens_bytes: tuple[int, int], block_bytes: int
) -> None:
    """Print each change, then medians; `tokens_bytes`: of KV of a token on one engine alone, tokens
    of all requests.
    """
    pulls = events_of(trace, 0, "pull")
    extra: dict[int, list[float]] = defaultdict(list)
    for number, each in enumerate(seen.changes):
        mine = [p for p in pulls if each.ordered_s <= p["ts"] / 1e6 <= each.over_s]
        size, peak = len(each.groups[0]), max(p["args"]["blocks_in_use"] for p in mine)
        extra[size].append((peak - each.blocks_before) * block_bytes / MIB)
        copied = sum(p["args"]["tokens"] for p in mine) * tokens_bytes[0] / size / MIB
        took_ms = 1e3 * (max(p["ts"] + p["dur"] for p in mine) / 1e6 - each.ordered_s)
        used = each.blocks_before * block_bytes / MIB
        print(
            f"change {number}, to groups of {size}: {used:.0f} MiB in use, at most "
            f"{extra[size][-1]:+.1f}, "
            f"{copied:.1f} MiB copied in {len(mine)} pulls, the last after {took_ms:.0f} ms; "
            f"{each.again} prefilled again"
        )
    for size, more in sorted(extra.items()):
        print(
            f"extra memory to groups of {size}: median {median(more):.1f} MiB, largest "
            f"{max(more):.1f} (bar 32)"
        )
    found = steps(trace, seen)
    ratios = [
        tuple(
            median(v[i] for v in found["with"][n]) / median(v[i] for v in found["without"][n])
            for i in (0, 1)
        )
        for n in sorted(found["with"])
        if found["without"].get(n)
    ]
    counts = [sum(map(len, found[key].values())) for key in ("with", "without")]
    if ratios:
        print(
            f"steps of as many requests, with KV pulled before them or not ({counts[0]} and "
            f"{counts[1]}): step "
            f"{median(r[0] for r in ratios):.3f} (bar 1.01), with pull "
            f"{median(r[1] for r in ratios):.3f}"
        )


def main() -> None:
    """Run all rounds, stop the server, and read its trace."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kv", type=float, default=0.9, help="share of each engine's KV memory that is used"
    )
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    model = make_model(ROOT / ".models" / "llama-75m", "llama-75m")
    with TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        system = System("ours", model, [*FLAGS, f"--trace-out={path}"], ours=True)
        try:
            blocks = system.ask("status")["engines"][0]["blocks"]
            holds = (blocks - 1) * 32
            prompt_tokens = int(options.kv * holds) // (STREAMS // ENGINES)
            print(
                f"{commit()}: an engine holds {holds} tokens; prompts of {prompt_tokens}",
                flush=True,
            )
            seen = Seen()
            for number in range(options.rounds):
                asyncio.run(run_round(system, number, prompt_tokens, seen))
            arrived, again = migrated(system)
            print(
                f"{arrived} requests migrated with their KV, {again} were prefilled again (bar 0)"
            )
            httpx.post(f"{system.url}/flying/check", json={}, timeout=60).raise_for_status()
        finally:
            system.stop()
        trace = json.loads(path.read_text(encoding="utf-8"))
    block_bytes = KV_BYTES // blocks
    report(trace, seen, (block_bytes // 32, prompt_tokens), block_bytes)


if __name__ == "__main__":
    with ended_by_signals():
        main()
