"""`flying-serving bench`: make a workload, save it, replay it from its file, keep and show the
results.
"""

import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from flying_lab.bench import view
from flying_lab.bench.options import BenchOptions, WorkloadOptions, make_out
from flying_lab.bench.plan import workload_of
from flying_lab.bench.replay import RESULTS, SUMMARY, replay_one
from flying_lab.bench.servers import ServerArgs, parse_server_args
from flying_lab.errors import BenchError
from flying_lab.workload import files
from flying_lab.workload.model import Workload
from flying_lab.workload.read import read_workload
from flying_serving.errors import ConfigError


def main(options: BenchOptions, workload: WorkloadOptions, server: Sequence[str]) -> int:
    """Run the command, with `server` after the `--`. Returns the exit code, 1 if a server cannot be
    measured or completed nothing.

    Raises:
        FlyingError: if the options or the trace cannot be used.
    """
    args = _server_args(options, server)
    console = Console(stderr=options.as_json, highlight=False)
    made = workload_of(workload)
    out = _directory(options, made)
    kept = _saved(
        made, options.save_workload or out / "workload.jsonl", options.save_timed_trace, console
    )
    if options.dry_run:
        return 0
    try:
        if args is not None:
            from flying_lab.bench import compare  # matplotlib

            return compare.run(options, args, kept, out, console)
        return _measure(options, kept, out, console)
    except BenchError as error:
        sys.stderr.write(f"flying-serving: {error}\n")
        return 1


def _server_args(options: BenchOptions, server: Sequence[str]) -> ServerArgs | None:
    """Return the model and flags of servers to compare; None if none are compared."""
    args = parse_server_args(server) if server else None
    if options.compare and args is None:
        raise ConfigError(
            "--compare needs the servers' model and flags behind a --: -- MODEL [FLAGS]"
        )
    if args is not None and not options.compare:
        raise ConfigError(f"-- {args.model}: only --compare starts servers")
    return args


def _measure(options: BenchOptions, workload: Workload, out: Path, console: Console) -> int:
    summary = replay_one(
        options, workload, options.url.rstrip("/").removesuffix("/v1"), out, console
    ).summary
    if warning := view.lag_warning([summary]):
        sys.stderr.write(f"flying-serving: {warning}\n")
    if options.as_json:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        console.print(view.report(summary))
        console.print(
            f"{out / RESULTS}: a row for each request; {out / SUMMARY}: all numbers", soft_wrap=True
        )
    return 0 if summary["completed"] else 1


def _directory(options: BenchOptions, workload: Workload) -> Path:
    """Return the directory for results; created if it is missing."""
    name = re.sub(r"[^\w.-]", "-", workload.name)
    out = options.out or Path(f"bench-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if any([*out.glob(RESULTS), *out.glob(f"*/{RESULTS}")]):
        raise ConfigError(f"--out={str(out)!r}: there are results already")
    if not options.dry_run or options.save_workload is None:
        make_out(out)
    return out


def _saved(workload: Workload, path: Path, timed: Path | None, console: Console) -> Workload:
    """Save the workload, and return it as read back from the file: the replay uses the file's
    contents.
    """
    try:
        files.save(workload, path)
        if timed is not None:
            files.save_timed_trace(workload, timed)
    except OSError as error:
        raise ConfigError(
            f"{error.filename}: the workload cannot be saved: {error.strerror}"
        ) from None
    kept = read_workload(path, format="flying")
    console.print(
        f"{path}: {len(kept.requests)} requests in {kept.duration_s:.1f} s, "
        f"{kept.prompt_tokens} prompt and {kept.output_tokens} output tokens",
        soft_wrap=True,
    )
    return kept
