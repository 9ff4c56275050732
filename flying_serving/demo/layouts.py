"""The demo's first part: two engines share a request; then requests stream while an operator takes the layout through
1+1+1+1, 2+2 and 4."""

import asyncio
import json
import tempfile
from functools import partial
from pathlib import Path

import httpx
from msgspec.structs import replace
from rich.console import Console

from flying_serving.bench import servers, view
from flying_serving.bench.client import Replay
from flying_serving.bench.options import BenchOptions
from flying_serving.bench.replay import SWITCHES, replay_one
from flying_serving.cli import render
from flying_serving.demo import split
from flying_serving.demo.server import ENGINES, FLAGS, problems, show_start
from flying_serving.testing.tiny import make_model
from flying_serving.workload.model import Workload
from flying_serving.workload.synth import Poisson, synthesise

RATE_RPS = 5.0
SWITCH_S = 60.0
SINGLE, PAIRS, ALL = [[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]
PLAN = (
    (PAIRS, "weave"),
    (ALL, "weave"),
    (SINGLE, "weave"),
    (PAIRS, "hard"),
    (ALL, "hard"),
    (SINGLE, "hard"),
)
OPTIONS = BenchOptions(token_ids=(0, 255))
"""Byte tokens of the tiny model's tokenizer."""


def run(console: Console, models: Path, seconds: float) -> list[str]:
    """Start a server, go through PLAN with `seconds` in each layout, stop. Returns what was wrong."""
    model = make_model(models / "llama", "llama")
    out = Path(tempfile.mkdtemp(prefix="flying-demo-"))
    args = servers.parse_server_args([str(model), f"--data-parallel-size={ENGINES}", *FLAGS])
    with servers.start("manual", args, "", out / "server.log") as server:
        ready_s = show_start(server, console)
        seen = split.show(server.url)
        console.print(f"{ENGINES} engines ready in {ready_s:.1f} s", *([] if seen.wrong else [seen.line]), sep="\n")
        console.print(f"{RATE_RPS:g} requests/s from here on")
        operator = partial(_operate, server.url, console, seconds)
        replayed = replay_one(OPTIONS, workload(seconds), server.url, out, console, operator)
        if replayed.stopped:
            raise KeyboardInterrupt
        check = httpx.post(f"{server.url}/flying/check", json={}, timeout=SWITCH_S, trust_env=False)
        stopped = server.stop()
    records = json.loads((out / SWITCHES).read_text(encoding="utf-8"))["switches"]
    console.print(view.report(replayed.summary), render.switches(records), sep="\n")
    wrong = seen.wrong + problems(out)
    if len(records) != len(PLAN):
        wrong.append(f"{len(records)} switches recorded, {len(PLAN)} made")
    times = [(record["number"], name, record[name]) for record in records for name in ("cutover_ms", "drain_ms")]
    wrong += [f"switch {number} has no {name}" for number, name, value in times if value is None]
    if check.status_code != 200:
        wrong.append(f"block bookkeeping: {check.text}")
    return wrong if stopped else [*wrong, "the server had to be killed"]


def workload(seconds: float) -> Workload:
    """Poisson arrivals; the phase of a request is the layout that is planned at its arrival."""
    duration_s = seconds * (1 + len(PLAN))
    kind = Poisson(duration_s=duration_s, rate_rps=RATE_RPS, prompt_tokens=(32, 160), output_tokens=(48, 144))
    made = synthesise(kind, seed=0)
    phases = [render.degrees_text(groups) for groups in (SINGLE, *(groups for groups, _ in PLAN))]
    return made.having(replace(request, phase=phases[int(request.arrival_s / seconds)]) for request in made.requests)


async def _operate(url: str, console: Console, seconds: float, replay: Replay) -> None:
    """Order the layouts of PLAN, one each `seconds`."""
    async with httpx.AsyncClient(base_url=url, timeout=SWITCH_S, trust_env=False) as http:
        for number, (groups, mode) in enumerate(PLAN, 1):
            await asyncio.sleep(max(0.0, number * seconds - replay.elapsed_s))
            answer = await http.post("/flying/layout", json={"groups": groups, "mode": mode})
            cutover_ms = answer.raise_for_status().json()["cutover_ms"]
            console.print(f"to {render.degrees_text(groups)} by {mode}: cutover {cutover_ms:.1f} ms")
