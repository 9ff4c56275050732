"""The demo's first part: streams through 1+1+1+1, 2+2 and 4, and what each switch costs. An operator decides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from flying_serving.cli.render import degrees_text
from flying_serving.demo.load import Load
from flying_serving.demo.report import Groups, Window, layouts_table, problems, switches_table
from flying_serving.demo.server import DemoServer
from flying_serving.testing.tiny import make_model

ENGINES = 4
STREAMS = 8
KV_BYTES = 2**26
WARM_S = 1.0
SWITCH_S = 60.0
SINGLE: Groups = [[0], [1], [2], [3]]
PAIRS: Groups = [[0, 1], [2, 3]]
ALL: Groups = [[0, 1, 2, 3]]
PLAN: tuple[tuple[Groups, str], ...] = (
    (PAIRS, "weave"),
    (ALL, "weave"),
    (SINGLE, "weave"),
    (PAIRS, "hard"),
    (ALL, "hard"),
    (SINGLE, "hard"),
)


def run(console: Console, models: Path, seconds: float) -> list[str]:
    """Start a server, go through PLAN with `seconds` in each layout, stop. Returns what was wrong."""
    server = DemoServer(make_model(models / "llama", "llama"), ENGINES, "manual", KV_BYTES)
    try:
        ready_s = server.show_start(console)
        console.print(f"{ENGINES} engines ready in {ready_s:.1f} s; {STREAMS} streams in each layout from here on")
        wrong = asyncio.run(_stream(console, server, seconds))
    finally:
        stopped = server.stop()
    return wrong if stopped else [*wrong, "the server had to be killed"]


async def _stream(console: Console, server: DemoServer, seconds: float) -> list[str]:
    """Streams and switches, then the tables. Returns what was wrong."""
    load = Load(server.url, server.model, STREAMS)
    async with httpx.AsyncClient(base_url=server.url, timeout=SWITCH_S, trust_env=False) as http:
        try:
            load.next_phase()
            await asyncio.sleep(WARM_S)
            windows = await _switch_and_watch(console, http, load, seconds)
            with console.status("waiting for the last streams"):
                await load.finish()
        finally:
            await load.cancel()
        records: list[dict[str, Any]] = (await http.get("/flying/switches")).raise_for_status().json()["switches"]
        check = await http.post("/flying/check", json={})
    console.print(layouts_table(windows, load.streams), switches_table(records), sep="\n")
    tokens = sum(stream.tokens for stream in load.streams)
    wrong = problems(load.streams, records, len(PLAN))
    failed = sum(stream.problem is not None for stream in load.streams)
    console.print(f"{len(load.streams)} requests, {tokens} tokens, {failed} failed or truncated")
    if check.status_code != 200:
        wrong.append(f"block bookkeeping: {check.text}")
    return wrong


async def _switch_and_watch(console: Console, http: httpx.AsyncClient, load: Load, seconds: float) -> Sequence[Window]:
    """Go through PLAN under load, `seconds` in each layout."""
    windows = []
    groups = SINGLE
    for step in (*PLAN, None):
        begin = time.monotonic()
        with console.status(f"layout {degrees_text(groups)}"):
            await asyncio.sleep(seconds)
        windows.append(Window(groups, begin, time.monotonic()))
        if step is not None:
            before, (groups, mode) = groups, step
            answer = await http.post("/flying/layout", json={"groups": groups, "mode": mode})
            answer.raise_for_status()
            load.next_phase()
            took = answer.json()["cutover_ms"]
            console.print(f"{degrees_text(before)} → {degrees_text(groups)} by {mode}: cutover {took:.1f} ms")
    return windows
