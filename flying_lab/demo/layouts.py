"""The demo's first part: a real tiny model, whose tokens are the same in every layout.

Two engines share a request. Then requests stream while an operator changes the layout from engines
apart to all together and back.
"""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from msgspec.structs import replace
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from flying_lab.bench import servers, view
from flying_lab.bench.client import Replay
from flying_lab.bench.options import BenchOptions
from flying_lab.bench.replay import SWITCHES, replay_one
from flying_lab.demo import split, tokens
from flying_lab.demo.server import ENGINES, FLAGS, SIZES, Shown, layout_of, problems, show_start
from flying_lab.tiny_models.checkpoint import make_model
from flying_lab.workload.model import Workload
from flying_lab.workload.synth import Poisson, synthesise
from flying_serving.cli import render

RATE_RPS = 5.0
SWITCH_S = 60.0
PLAN = tuple((layout_of(size), mode) for mode in ("weave", "hard") for size in (*SIZES[1:], 1))
OPTIONS = BenchOptions(token_ids=(0, 255))
"""The token ids are the byte tokens of the tiny model's tokenizer."""


def run(console: Console, models: Path, seconds: float) -> Shown:
    """Start a server, go through PLAN with `seconds` in each layout, compare tokens, stop."""
    model = make_model(models / "llama", "llama")
    out = Path(tempfile.mkdtemp(prefix="flying-demo-"))
    args = servers.parse_server_args([str(model), f"--data-parallel-size={ENGINES}", *FLAGS])
    with servers.start("manual", args, "", out / "server.log") as server:
        ready_s = show_start(server, console)
        seen = split.show(server.url)
        console.print(f"a tiny model with real tokens; {ENGINES} engines ready in {ready_s:.1f} s")
        if not seen.wrong:
            console.print(seen.line)

        console.print(f"{RATE_RPS:g} requests/s from here on")
        operator = partial(_operate, server.url, console, seconds)
        replayed = replay_one(OPTIONS, workload(seconds), server.url, out, console, operator)
        if replayed.stopped:
            raise KeyboardInterrupt

        by_layout = tokens.collect(server.url)
        check = httpx.post(f"{server.url}/flying/check", json={}, timeout=SWITCH_S, trust_env=False)
        stopped = server.stop()

    records = json.loads((out / SWITCHES).read_text(encoding="utf-8"))["switches"]
    console.print(view.report(replayed.summary), switch_table(records), sep="\n")
    wrong = [*seen.wrong, *problems(out), *tokens.wrong(by_layout), *unmade(records)]
    if check.status_code != 200:
        wrong.append(f"block bookkeeping: {check.text}")
    if not wrong:
        console.print(tokens.line(by_layout), conclusion(records), sep="\n")
    return Shown(wrong if stopped else [*wrong, "the server had to be killed"], [replayed.summary])


def unmade(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return the problems in the log of switches: one that is missing, or was not carried out."""
    found = []
    if len(records) != len(PLAN):
        found.append(f"{len(records)} switches recorded, {len(PLAN)} made")
    for record in records:
        for name in ("cutover_ms", "drain_ms"):
            if record[name] is None:
                found.append(f"switch {record['number']} has no {name}")
    return found


def workload(seconds: float) -> Workload:
    """Return Poisson arrivals; the phase of a request is the layout that is planned at its
    arrival.
    """
    duration_s = seconds * (1 + len(PLAN))
    kind = Poisson(
        duration_s=duration_s, rate_rps=RATE_RPS, prompt_tokens=(32, 160), output_tokens=(48, 144)
    )
    made = synthesise(kind, seed=0)
    phases = [
        render.degrees_text(groups) for groups in (layout_of(1), *(groups for groups, _ in PLAN))
    ]
    return made.having(
        replace(request, phase=phases[int(request.arrival_s / seconds)])
        for request in made.requests
    )


def switch_table(records: Sequence[dict[str, Any]]) -> Table:
    """Return a table with one row for each switch: its times, and the longest gap of a stream."""
    title = "\nthe switches, times in ms; gap: the longest time without a token of a stream"
    table = Table(title=title, title_justify="left", title_style="", box=SIMPLE)
    for heading in ("from", "to", "mode"):
        table.add_column(heading, no_wrap=True)
    for heading in ("in flight", "cutover", "drain", "gap"):
        table.add_column(heading, justify="right")
    for one in records:
        times = (
            render.figure(one[f"{name}_ms"]) for name in ("cutover", "drain", "worst_token_gap")
        )
        degrees = (render.degrees_text(one[end]) for end in ("from", "to"))
        table.add_row(*degrees, one["mode"], str(one["requests_in_flight"]), *times)
    return table


def conclusion(records: Sequence[dict[str, Any]]) -> str:
    """Return the findings for a newcomer, in plain words."""
    cutover_ms = max(one["cutover_ms"] for one in records)
    gaps = {
        mode: max(one["worst_token_gap_ms"] for one in records if one["mode"] == mode)
        for _, mode in PLAN
    }
    stood = ", ".join(f"{gap_ms / 1e3:.2f} s with mode {mode}" for mode, gap_ms in gaps.items())
    return (
        f"In plain words: the layout changed {len(records)} times while requests streamed, each "
        "time within "
        f"{cutover_ms:.0f} ms. No stream stood still for longer than {stood}."
    )


async def _operate(url: str, console: Console, seconds: float, replay: Replay) -> None:
    """Order the layouts of PLAN, one each `seconds`."""
    async with httpx.AsyncClient(base_url=url, timeout=SWITCH_S, trust_env=False) as http:
        for number, (groups, mode) in enumerate(PLAN, 1):
            await asyncio.sleep(max(0.0, number * seconds - replay.elapsed_s))
            answer = await http.post("/flying/layout", json={"groups": groups, "mode": mode})
            cutover_ms = answer.raise_for_status().json()["cutover_ms"]
            console.print(
                f"to {render.degrees_text(groups)} by {mode}: cutover {cutover_ms:.1f} ms"
            )
