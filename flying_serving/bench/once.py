"""One replay against one server: its progress shown, its results and the server's log of switches kept."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from flying_serving.bench import switchlog, view
from flying_serving.bench.client import INTERRUPTED, Target
from flying_serving.bench.plan import Plan
from flying_serving.bench.run import ReplaySettings, measure, probe, save, too_long
from flying_serving.errors import BenchError
from flying_serving.results.record import NOT_SENT
from flying_serving.results.results import Results
from flying_serving.workload.model import Workload

RESULTS = "results.parquet"
SWITCHES = "switches.json"
SUMMARY = "summary.json"


@dataclass(frozen=True)
class Replayed:
    """What a replay gave."""

    results: Results
    summary: dict[str, Any]

    @property
    def stopped(self) -> bool:
        """Whether somebody ended it before it was through."""
        return any(error in (INTERRUPTED, NOT_SENT) for error in self.results.texts("error"))


def replay(plan: Plan, workload: Workload, url: str, out: Path, console: Console) -> Replayed:
    """Replay the workload; write results, summary and, of a server that has one, its log of switches into `out`.

    Raises:
        BenchError: if the server cannot be measured.
    """
    target = Target(url, plan.api_key)
    first, last = plan.token_ids
    settings = ReplaySettings(range(first, last + 1), plan.prompt_seed, plan.timeout_s, plan.extra_body)
    served = probe(target, settings, plan.model)
    if longer := too_long(workload, served):
        limit = f"the {served.max_tokens} tokens of {served.model}"
        sys.stderr.write(f"flying-serving: {longer} of {len(workload.requests)} requests need more than {limit}\n")
    with view.Watch(console, len(workload.requests)) as watch:
        results = measure(workload, target, served, settings, made=watch.made, watch=watch.replaying)
    summary = save(results, out, plan.slo)
    _keep_switches(target, out)
    if warning := view.lag_warning(summary):
        sys.stderr.write(f"flying-serving: {warning}\n")
    return Replayed(results, summary)


def _keep_switches(target: Target, out: Path) -> None:
    """A server that is gone by now has its results all the same."""
    try:
        log = switchlog.fetch(target)
    except BenchError as error:
        sys.stderr.write(f"flying-serving: {error}\n")
        return
    if log is not None:
        switchlog.save(log, out / SWITCHES)
