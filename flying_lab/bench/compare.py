"""`flying-serving bench --compare`: one server after the other, the same workload file, one
report.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flying_lab.bench import servers, view
from flying_lab.bench.options import BenchOptions
from flying_lab.bench.replay import RESULTS, Replayed, replay_one
from flying_lab.bench.report import load, page
from flying_lab.bench.report.load import Started
from flying_lab.bench.servers import ServerArgs
from flying_lab.errors import BenchError
from flying_lab.signals import ended_by_signals
from flying_lab.workload.model import Workload
from flying_serving.errors import ServerFailed

ENDED = 130
COLUMNS = (
    ("TTFT mean", "mean_ttft_ms"),
    ("p90", "p90_ttft_ms"),
    ("TPOT median", "median_tpot_ms"),
    ("p90", "p90_tpot_ms"),
    ("E2E mean", "mean_e2el_ms"),
    ("tokens/s", "output_throughput"),
    ("most", "max_output_tokens_per_s"),
)


@dataclass(frozen=True)
class Compared:
    """The outcome of a comparison: the measured systems in their order, and the exit code."""

    measured: dict[str, Replayed]
    code: int

    @property
    def summaries(self) -> dict[str, dict[str, Any]]:
        """The summary of each measured system."""
        return {name: one.summary for name, one in self.measured.items()}


def run(
    options: BenchOptions, args: ServerArgs, workload: Workload, out: Path, console: Console
) -> int:
    """Measure each system in turn, write the report and show one row for each. Returns the exit
    code.
    """
    compared = measure_each(options, args, workload, out, console)
    summaries = compared.summaries
    if not summaries:
        return compared.code
    report = page.write(load.comparison(out), out)
    if options.as_json:
        sys.stdout.write(json.dumps(summaries) + "\n")
    else:
        console.print(view.systems("times in ms, of completed requests", COLUMNS, summaries))
        console.print(
            f"{report}: the report; {out}/*/{RESULTS}: a row for each request", soft_wrap=True
        )
    if warning := view.lag_warning(summaries.values()):
        sys.stderr.write(f"flying-serving: {warning}\n")
    return compared.code or int(not all(summary["completed"] for summary in summaries.values()))


def measure_each(
    options: BenchOptions, args: ServerArgs, workload: Workload, out: Path, console: Console
) -> Compared:
    """Measure each system in turn, with its results in a directory of `out`.

    A system that cannot be measured is reported and left out. Ctrl-C, SIGTERM and SIGHUP end the
    comparison: the server is ended, and the results until then are kept.
    """
    measured: dict[str, Replayed] = {}
    started: dict[str, Started] = {}
    code = 0
    try:
        with ended_by_signals():
            for name in options.compare:
                try:
                    measured[name], started[name] = _measure(
                        name, options, args, workload, out / name, console
                    )
                except (BenchError, ServerFailed) as error:
                    sys.stderr.write(f"flying-serving: {name}: {error}\n")
                    code = 1
                    continue
                load.save_comparison(started, out)
                if measured[name].stopped:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        sys.stderr.write("flying-serving: ended early\n")
        code = ENDED
    return Compared(measured, code)


def _measure(
    name: str,
    options: BenchOptions,
    args: ServerArgs,
    workload: Workload,
    out: Path,
    console: Console,
) -> tuple[Replayed, Started]:
    """Start one server, replay the workload, and end the server."""
    out.mkdir(exist_ok=True)
    log = out / "server.log"
    console.print(f"{name}: starting, its log is {log}", soft_wrap=True)
    with servers.start(name, args, options.api_key, log) as server:
        ready_s = server.wait_until_ready(servers.READY_S)
        console.print(f"{name}: ready after {ready_s:.1f} s", soft_wrap=True)
        replayed = replay_one(options, workload, server.url, out, console)
    console.print(f"{name}: replayed in {replayed.results.run.duration_s:.1f} s", soft_wrap=True)
    return replayed, Started(servers.command_line(name, args, server.port.number), ready_s)
