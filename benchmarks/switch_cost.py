"""What a switch costs under a steady load: each way to switch in turn, all engines apart and all
together.

python -m benchmarks.switch_cost [--engines 4] [--rounds 10] [--streams 8]

Each switch is left to drain before the next. The worst token gap is given in steps of the slower
layout: the time per token of a stream there, under the same load.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
from collections import defaultdict
from statistics import median
from typing import Any

import httpx
import numpy as np

from benchmarks.client import prompt, stream
from benchmarks.systems import ROOT, System
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model
from flying_serving.config import MODES

FLAGS = [
    "--policy=manual",
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    "--block-size=32",
    "--max-num-seqs=32",
    "--kv-cache-memory-bytes=67108864",
    "--disable-uvicorn-access-log",
]
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
WAYS = [(mode, wide) for mode in MODES for wide in (True, False)]
_seeds = itertools.count(1)


class Load:
    """A number of clients that each send the next request when the last has ended."""

    def __init__(self, http: httpx.AsyncClient, model: str, streams: int) -> None:
        self.per_token_s: list[float] = []
        self._http, self._model = http, model
        self._stopping = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(streams)]

    async def _client(self) -> None:
        while not self._stopping:
            result = await stream(
                self._http, self._model, prompt(PROMPT_TOKENS, next(_seeds)), OUTPUT_TOKENS
            )
            self.per_token_s.append(result.tpot_s)

    async def stop(self) -> None:
        """Let the requests under way end; raises what any of them raised."""
        self._stopping = True
        await asyncio.gather(*self._tasks)


async def order(http: httpx.AsyncClient, engines: int, mode: str, wide: bool) -> dict[str, Any]:
    """Switch, wait until the old layout has drained, and return the record."""
    groups = [list(range(engines))] if wide else [[engine] for engine in range(engines)]
    answer = await http.post("/flying/layout", json={"groups": groups, "mode": mode}, timeout=120)
    number = answer.raise_for_status().json()["number"]
    for _ in range(600):
        records = (await http.get("/flying/switches")).json()["switches"]
        record: dict[str, Any] = next(r for r in records if r["number"] == number)
        if record["drain_ms"] is not None:
            return record
        await asyncio.sleep(0.1)
    raise RuntimeError(f"switch {number} has not drained for a minute")


async def step_s(http: httpx.AsyncClient, load: Load, engines: int, wide: bool) -> float:
    """The median over requests of the mean time per token in a static layout."""
    await order(http, engines, "weave", wide)
    await asyncio.sleep(3)
    load.per_token_s.clear()
    await asyncio.sleep(8)
    return median(load.per_token_s)


async def measure(system: System, engines: int, rounds: int, streams: int) -> None:
    """Print the steps of both layouts, then a row for each way to switch."""
    async with httpx.AsyncClient(
        base_url=system.url, limits=httpx.Limits(max_connections=None), timeout=120
    ) as http:
        load = Load(http, system.model, streams)
        steps_s = {wide: await step_s(http, load, engines, wide) for wide in (True, False)}
        print(
            f"step: {steps_s[True] * 1e3:.1f} ms together, {steps_s[False] * 1e3:.1f} ms apart; "
            f"{streams} streams"
        )
        records: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for _ in range(rounds):
            for mode, wide in WAYS:
                records[mode].append(await order(http, engines, mode, wide))
                await asyncio.sleep(0.5)
        await load.stop()
    slower_ms = max(steps_s.values()) * 1e3
    for mode, rows in records.items():
        report(mode, rows, slower_ms)


def report(mode: str, rows: list[dict[str, Any]], slower_ms: float) -> None:
    """One line: median and 99th percentile of each figure."""
    cells = []
    for name in ("cutover_ms", "in_flight_step_ms", "overhead_ms", "work_ms", "drain_ms"):
        values = [row[name] for row in rows]
        cells.append(f"{name} {median(values):.2f}/{np.percentile(values, 99):.2f}")
    gaps = [row["worst_token_gap_ms"] / slower_ms for row in rows]
    cells.append(f"worst gap {median(gaps):.2f}/{max(gaps):.2f} steps")
    print(f"{mode:11} n={len(rows)}  " + "  ".join(cells), flush=True)


def main() -> None:
    """Start a server, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=8)
    options = parser.parse_args()
    flags = [*FLAGS, f"--data-parallel-size={options.engines}"]
    system = System(
        "switch cost", make_model(ROOT / ".models" / "llama", "llama"), flags, ours=True
    )
    try:
        asyncio.run(measure(system, options.engines, options.rounds, options.streams))
    finally:
        system.stop()


if __name__ == "__main__":
    with ended_by_signals():
        main()
