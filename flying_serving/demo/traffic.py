"""The demo's second part: `flying-serving bench --compare` over a burst between two quiet phases."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from flying_serving.bench.compare import ENDED
from flying_serving.bench.once import SUMMARY, SWITCHES
from flying_serving.cli import bench  # noqa: F401 - adds its command
from flying_serving.cli.admin import app
from flying_serving.demo.server import FLAGS
from flying_serving.testing.servers import CPU_ENVIRONMENT
from flying_serving.testing.tiny import make_model

POLICIES = ("auto", "static-dp", "static-tp")
TRAFFIC = (
    "duration_s=40",
    "low_rate_rps=1",
    "burst_rate_rps=8",
    "low_s=15",
    "burst_s=10",
    "prompt_tokens=64:256",
    "output_tokens=16:48",
)
ENGINES = ("--data-parallel-size=4", f"--kv-cache-memory-bytes={2**28}")


def run(console: Console, models: Path) -> list[str]:
    """Compare policy `auto` with both fixed layouts. Returns what was wrong; KeyboardInterrupt if it was ended."""
    model = make_model(models / "llama-75m", "llama-75m")
    out = Path(tempfile.mkdtemp(prefix="flying-demo-"))
    line = words(model, out)
    console.print(f"flying-serving {shlex.join(line)}", markup=False, soft_wrap=True)
    os.environ |= CPU_ENVIRONMENT
    code = app(line, standalone_mode=False)
    if code == ENDED:
        raise KeyboardInterrupt
    wrong = [f"bench ended with code {code}"] if code else []
    return wrong + [f"{policy}: {problem}" for policy in POLICIES for problem in problems(out / policy)]


def words(model: Path, out: Path) -> list[str]:
    """The command line, without the name of the program."""
    line = ["bench", "--compare", ",".join(POLICIES), "--synth", "alternating", "--seed", "1"]
    line += [word for parameter in TRAFFIC for word in ("--set", parameter)]
    return [*line, "--token-ids", "300:7999", "--out", str(out), "--", str(model), *ENGINES, *FLAGS]


def problems(results: Path) -> list[str]:
    """What is wrong in the results of one system: requests that failed or were cut short, switches that failed."""
    if not (results / SUMMARY).exists():
        return ["there are no results"]
    summary = json.loads((results / SUMMARY).read_text(encoding="utf-8"))
    found = [f"{summary[key]} requests {key}" for key in ("failed", "unfinished") if summary[key]]
    if not (results / SWITCHES).exists():
        return [*found, "there is no log of its switches"]
    records: list[dict[str, Any]] = json.loads((results / SWITCHES).read_text(encoding="utf-8"))["switches"]
    return found + [f"switch {one['number']}: {one['problem']}" for one in records if one["problem"] is not None]
