"""`make demo`: four engines on the CPU, eight streams, and layouts that change under them. Ends by itself.

Exit code 0: every request got all its tokens, every switch was made, and the block bookkeeping adds up.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

import flying_serving
from flying_serving.cli.render import degrees_text
from flying_serving.demo.load import Load
from flying_serving.demo.report import Groups, Window, layouts_table, problems, switches_table
from flying_serving.demo.server import DemoServer, ServerFailed, ended_by_signals
from flying_serving.demo.tiny import make_model

ENGINES = 4
STREAMS = 8
WARM_S = 2.0
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
CHECKOUT = Path(flying_serving.__file__).resolve().parents[1]
INTERRUPTED = 130


def main() -> int:
    """Run the demo; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flying_serving.demo", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each layout stays (default: %(default)s)")
    parser.add_argument("--models", type=Path, default=CHECKOUT / ".models", help="where the tiny model is kept")
    options = parser.parse_args()
    if not 0.5 <= options.seconds <= 600:
        parser.error("--seconds must be between 0.5 and 600")
    console = Console(highlight=False)
    try:
        with ended_by_signals():
            return _demo(console, options.models, options.seconds)
    except KeyboardInterrupt:
        console.print("[yellow]interrupted; the server is stopped[/yellow]")
        return INTERRUPTED
    except (ServerFailed, OSError, httpx.HTTPError) as error:
        console.print(f"the demo failed: {error}", style="red", markup=False)
        return 1


def _demo(console: Console, models: Path, seconds: float) -> int:
    """Make the model, start the server, run, stop."""
    begun = time.monotonic()
    model = make_model(models / "llama", "llama")
    server = DemoServer(model, ENGINES)
    try:
        ready_s = server.wait_until_ready(console)
        console.print(f"{ENGINES} engines ready in {ready_s:.1f} s; {STREAMS} streams in each layout from here on")
        wrong = asyncio.run(_run(console, server, seconds))
    finally:
        stopped = server.stop()
    if not stopped:
        wrong.append("the server had to be killed")
    for line in wrong[:20]:
        console.print(f"wrong: {line}", style="red", markup=False)
    took = f"{time.monotonic() - begun:.0f} s in all"
    console.print(
        f"[red]{len(wrong)} things were wrong[/red]; {took}" if wrong else f"[green]all right[/green]; {took}"
    )
    return 1 if wrong else 0


async def _run(console: Console, server: DemoServer, seconds: float) -> list[str]:
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
        check = await http.post("/flying/check")
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
            before, (groups, preempt) = groups, step
            answer = await http.post("/flying/layout", json={"groups": groups, "preempt": preempt})
            answer.raise_for_status()
            load.next_phase()
            took = answer.json()["cutover_ms"]
            console.print(f"{degrees_text(before)} → {degrees_text(groups)} by {preempt}: cutover {took:.1f} ms")
    return windows


if __name__ == "__main__":
    sys.exit(main())
