"""Two switches of a live server, as its trace has them: engines join while requests stream, and
part again.

python -m benchmarks.traced_switch [--out docs/lab/results/numbers/traced_switch.json]

What is kept is the trace near the switches and the times of the tokens at the client, on one clock:
`python -m experiments --pages` draws them. One run on a small model: the picture shows what a
switch is, and no figure of it is a benchmark's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import httpx

from benchmarks.client import ANSWER_S, Stream, prompt, stream
from benchmarks.rounds import NUMBERS
from benchmarks.switch_cost import FLAGS
from benchmarks.systems import DP, ROOT, System, commit
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model

KEPT = NUMBERS / "traced_switch.json"
STREAMS, PROMPT_TOKENS, OUTPUT_TOKENS = 6, 64, 600
TOGETHER, APART = [[0, 1]], [[0], [1]]
BEFORE_S, BETWEEN_S = 1.0, 0.12
NEAR_MS = 80.0
"""Kept before the first switch and after the last."""


async def traffic(system: System) -> list[Stream]:
    """Let engines join and part while requests stream. Returns the streams."""
    async with httpx.AsyncClient(base_url=system.url, timeout=ANSWER_S) as http:
        tasks = []
        for seed in range(STREAMS):
            began = asyncio.Event()
            asked = prompt(PROMPT_TOKENS, seed)
            sent = stream(http, system.model, asked, OUTPUT_TOKENS, began=began)
            tasks.append(asyncio.create_task(sent))
            await began.wait()
        await asyncio.sleep(BEFORE_S)
        for groups in (TOGETHER, APART):
            body = {"groups": groups, "mode": "migrate"}
            (await http.post("/flying/layout", json=body)).raise_for_status()
            await asyncio.sleep(BETWEEN_S)
        return await asyncio.gather(*tasks)


def near(events: list[dict[str, Any]], streams: list[Stream]) -> dict[str, Any]:
    """Return what is kept of a trace and of streams: the switches, and the steps, copies of KV and
    tokens near them.

    Raises RuntimeError unless both switches are in the trace.
    """
    engines = {
        (event["pid"], event["tid"]): int(event["args"]["name"].removeprefix("engine "))
        for event in events
        if event["name"] == "thread_name" and event["args"]["name"].startswith("engine ")
    }
    cutovers = sorted(
        (event for event in events if event.get("cat") == "cutover"), key=lambda one: one["ts"]
    )
    if len(cutovers) != 2:
        raise RuntimeError(f"{len(cutovers)} switches are in the trace, not 2")
    first_ms, last_ms = (one["ts"] / 1e3 for one in cutovers)
    begin_ms, end_ms = first_ms - NEAR_MS, last_ms + NEAR_MS

    def is_near(at_ms: float) -> bool:
        return begin_ms <= at_ms <= end_ms

    switches = [
        {
            "what": what,
            "at_ms": one["ts"] / 1e3 - begin_ms,
            "cutover_ms": one["args"]["cutover_ms"],
        }
        for what, one in zip(("engines join", "engines part"), cutovers, strict=True)
    ]
    steps, pulls = (
        [event for event in events if event.get("cat") == kind and is_near(event["ts"] / 1e3)]
        for kind in ("step", "pull")
    )

    def span(event: dict[str, Any]) -> dict[str, Any]:
        return {
            "engine": engines[event["pid"], event["tid"]],
            "at_ms": round(event["ts"] / 1e3 - begin_ms, 3),
            "took_ms": event["dur"] / 1e3,
        }

    tokens_ms = [
        [round(at_s * 1e3 - begin_ms, 3) for at_s in one.token_s if is_near(at_s * 1e3)]
        for one in streams
    ]
    return {
        "switches": switches,
        "steps": [span(step) | {"size": len(step["args"]["group"])} for step in steps],
        "pulls": [span(pull) for pull in pulls],
        "tokens_ms": tokens_ms,
    }


def main() -> None:
    """Record and keep."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.traced_switch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=KEPT)
    args = parser.parse_args()
    model = make_model(ROOT / ".models" / "llama", "llama")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        system = System("traced", model, [*FLAGS, DP, f"--trace-out={trace}"], ours=True)
        try:
            streams = asyncio.run(traffic(system))
        finally:
            system.stop()
        text = trace.read_text(encoding="utf-8")
    events = json.loads(text if text.endswith("\n]\n") else text.removesuffix(",\n") + "]")
    kept = {"commit": commit(), **near(events, streams)}
    args.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    for switch in kept["switches"]:
        print(f"{switch['what']}: {switch['cutover_ms']} ms")


if __name__ == "__main__":
    with ended_by_signals():
        main()
