"""`flying-serving bench`: make a workload, save it, replay it from its file, keep and show the results."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from flying_serving.bench import once, view
from flying_serving.bench.once import RESULTS, SUMMARY
from flying_serving.bench.plan import Plan, parse_plan, workload_of
from flying_serving.errors import BenchError, ConfigError
from flying_serving.workload import files
from flying_serving.workload.model import Workload
from flying_serving.workload.read import TraceOptions, read_workload


def main(options: Mapping[str, Any]) -> int:
    """Run the command; its exit code: 1 if the server cannot be measured, or completed nothing.

    Raises:
        FlyingError: if the options or the trace cannot be used.
    """
    plan = parse_plan(options)
    console = Console(stderr=plan.as_json, highlight=False)
    made = workload_of(plan)
    out = _directory(plan, made)
    workload = _saved(made, plan.save_workload or out / "workload.jsonl", plan.save_timed_trace, console)
    if plan.dry_run:
        return 0
    try:
        return _measure(plan, workload, out, console)
    except BenchError as error:
        sys.stderr.write(f"flying-serving: {error}\n")
        return 1


def _measure(plan: Plan, workload: Workload, out: Path, console: Console) -> int:
    if plan.compare:
        from flying_serving.bench import compare

        return compare.run(plan, workload, out, console)
    summary = once.replay(plan, workload, plan.url.rstrip("/").removesuffix("/v1"), out, console).summary
    if plan.as_json:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        console.print(view.report(summary))
        console.print(f"{out / RESULTS}: a row for each request; {out / SUMMARY}: all numbers", soft_wrap=True)
    return 0 if summary["completed"] else 1


def _directory(plan: Plan, workload: Workload) -> Path:
    """Where results go; made if it is not there."""
    name = re.sub(r"[^\w.-]", "-", workload.name)
    out = plan.out or Path(f"bench-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if any([*out.glob(RESULTS), *out.glob(f"*/{RESULTS}")]):
        raise ConfigError(f"--out={str(out)!r}: there are results already")
    if not plan.dry_run or plan.save_workload is None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out={str(out)!r}: {error.strerror}") from None
    return out


def _saved(workload: Workload, path: Path, timed: Path | None, console: Console) -> Workload:
    """The workload, read back from the file that it was saved to: what is replayed is what the file holds."""
    try:
        files.save(workload, path)
        if timed is not None:
            files.save_timed_trace(workload, timed)
    except OSError as error:
        raise ConfigError(f"{error.filename}: the workload cannot be saved: {error.strerror}") from None
    kept = read_workload(path, options=TraceOptions(format="flying"))
    console.print(
        f"{path}: {len(kept.requests)} requests in {kept.duration_s:.1f} s, "
        f"{kept.prompt_tokens} prompt and {kept.output_tokens} output tokens",
        soft_wrap=True,
    )
    return kept
