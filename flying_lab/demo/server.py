"""The demo's servers: their flags, the phases of their start, and the problems in their results."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from flying_lab.bench.replay import SUMMARY, SWITCHES
from flying_lab.results.metrics import Summary
from flying_lab.server_process import ServerProcess
from flying_serving.config import MAX_ENGINES
from flying_serving.placement.topology import read_topology


def engines_for(cores: int) -> int:
    """Return as many engines as cores: the largest power of two, and at least two, as one engine
    has nothing to switch.
    """
    return max(2, min(MAX_ENGINES, 1 << (cores.bit_length() - 1)))


ENGINES = engines_for(read_topology().usable_cores)
SIZES = tuple(1 << power for power in range(ENGINES.bit_length()))
"""Sizes of groups: from engines apart to all together."""
READY_S = 180.0
FLAGS = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=2048",
    "--block-size=32",
    "--max-num-batched-tokens=512",
    "--max-num-seqs=32",
    f"--kv-cache-memory-bytes={2**28}",
)
SERVER = "API server"
SERVER_PHASES = (
    ("non-default args", "reading the model's configuration"),
    ("Model Runner", "importing what engines need"),
    ("Starting vLLM server", "opening the port"),
)
"""Texts in the API server's log, and the phases that they begin."""
_SERVER_LINE = re.compile(r"^\(APIServer pid=\d+\) (.*)")
# Engines name their phases themselves (worker/lanes.py); the other lines are vLLM's.
_ENGINE_LINE = re.compile(
    r"^\(EngineCore_DP(\d+) pid=\d+\) .*?\] (?:engine \d+: (.*)|(init engine) .*)"
)


@dataclass(frozen=True)
class Shown:
    """The outcome of a part of the demo: its problems, and the summaries of its replays."""

    wrong: Sequence[str] = ()
    summaries: Sequence[Summary] = field(default=(), repr=False)


def layout_of(size: int) -> list[list[int]]:
    """Return the layout in groups of `size` engines."""
    return [list(range(first, first + size)) for first in range(0, ENGINES, size)]


def show_start(server: ServerProcess, console: Console) -> float:
    """Show the phase of each process until the server answers. Returns the seconds since its start.

    Raises:
        ServerFailed: if it ends, or takes longer than READY_S.
    """
    spinner = Spinner("dots")
    with Live(console=console, refresh_per_second=8, transient=True) as live:

        def show(waited_s: float) -> None:
            table = Table(
                box=None,
                show_header=False,
                title=f"starting, {waited_s:.0f} s",
                title_justify="left",
            )
            for name, phase in phases(server.log()).items():
                mark = "[green]✓[/green]" if phase == "ready" else spinner if phase else ""
                table.add_row(mark, name, phase)
            live.update(table)

        return server.wait_until_ready(READY_S, show)


def phases(log: str, engines: int = ENGINES) -> dict[str, str]:
    """Return the last phase that each process has begun, by its log lines."""
    found = {SERVER: "importing vLLM"} | {f"engine {number}": "" for number in range(engines)}
    for line in log.splitlines():
        if (engine := _ENGINE_LINE.match(line)) and f"engine {engine[1]}" in found:
            found[f"engine {engine[1]}"] = engine[2] or "ready"
            found[SERVER] = "waiting for the engines"
        elif server := _SERVER_LINE.match(line):
            found[SERVER] = next(
                (phase for text, phase in SERVER_PHASES if text in server[1]), found[SERVER]
            )
    return found


def problems(results: Path) -> list[str]:
    """Return the problems in the results of one system: requests that failed or were cut short,
    switches that failed.
    """
    if not (results / SUMMARY).exists():
        return ["there are no results"]
    summary = json.loads((results / SUMMARY).read_text(encoding="utf-8"))
    found = [f"{summary[key]} requests {key}" for key in ("failed", "unfinished") if summary[key]]
    if not (results / SWITCHES).exists():
        return [*found, "there is no log of its switches"]
    records: list[dict[str, Any]] = json.loads((results / SWITCHES).read_text(encoding="utf-8"))[
        "switches"
    ]
    return found + [
        f"switch {one['number']}: {one['problem']}" for one in records if one["problem"] is not None
    ]
