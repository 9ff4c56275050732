"""What the experiments share: the paper's machine and workload, runs that are made once, tables with reasons."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from flying_serving.bench.metrics import summarise
from flying_serving.sim import hardware, models
from flying_serving.sim.baselines import build
from flying_serving.sim.command import Simulated
from flying_serving.sim.machine import Modelled
from flying_serving.sim.run import results, simulate
from flying_serving.sim.system import Options, System
from flying_serving.workload.model import Workload
from flying_serving.workload.synth import Paper, Poisson, synthesise

DATA = Path(__file__).parent / "data"
RESULTS = Path(__file__).parent.parent / "docs" / "results"
PAPER: dict[str, Any] = json.loads((DATA / "paper.json").read_text(encoding="utf-8"))
MODELS = ("llama-3-70b", "gpt-oss-120b", "nemotron-8b")
UTILIZATION = 0.8
"""Inferred from the paper's capacities; docs/simulator.md."""
SLOTS = 256
"""Requests that a group may run (`--max-num-seqs`): inferred, docs/simulator.md."""
LOW_S, BURST_S = 60.0, 20.0
"""Lengths of phases, which the paper does not state: inferred, docs/simulator.md."""
SEED = 1
NOTABLE = 0.2
"""A number that differs by more than this from the paper's needs a sentence that says why."""
EQUAL = 0.005


@dataclass(frozen=True)
class Row:
    """One number: the paper's and ours, and whether more is better. `higher` None: neither is."""

    name: str
    paper: float | None
    ours: float
    higher: bool | None = None
    why: str = ""

    def of(self, model: str) -> Row:
        """The same with the model in its name."""
        return replace(self, name=f"{model}: {self.name}")

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's, if that reports one."""
        return self.ours / self.paper if self.paper else None

    @property
    def verdict(self) -> str:
        """Whether ours beats the paper's, in a word; empty if neither is better."""
        ratio = self.ratio
        if self.higher is None or ratio is None:
            return ""
        if abs(ratio - 1) <= EQUAL:
            return "equal"
        return "better" if (ratio > 1) == self.higher else "**worse**"


def machine(model: str, devices: str = "h200x8") -> Modelled:
    """The paper's."""
    return Modelled(models.load(model), hardware.parse_devices(devices), UTILIZATION)


def system(name: str, model: str, **options: Any) -> System:
    """One of the simulator's systems on the paper's machine, engines as small as possible."""
    where = machine(model)
    return build(name, where, where.smallest_engine, replace(Options(slots=SLOTS), **options))


def run(name: str | System, model: str, workload: Workload) -> Simulated:
    """Serve a workload."""
    one = system(name, model) if isinstance(name, str) else name
    outcome = simulate(one, workload.requests)
    table = results(one, workload, outcome, model)
    return Simulated(one, outcome, table, summarise(table))


@cache
def paper_workload(model: str, faster: float) -> Workload:
    """Section 6.1 of the paper, bursts so many times faster: its 4,000 requests, twice as many for smaller models."""
    paper = Paper(low_s=LOW_S, burst_s=BURST_S, burst_rate_rps=(10 * faster, 30 * faster))
    return synthesise(paper.model_copy(update={"requests": 4000 if model == "llama-3-70b" else 8000}), SEED)


@cache
def calibrated(model: str) -> tuple[float, Workload]:
    """The paper's workload with bursts in which static DP's mean TTFT is what the paper reports for it.

    The paper gives one range of rates for all models, which our smaller models would not notice. One number, static
    DP's, fixes the load; all others are compared.
    """
    wanted = PAPER[model]["burst_dp_ttft_s"]
    low, high = 0.5, 16.0
    for _ in range(8):
        middle = (low * high) ** 0.5
        workload = paper_workload(model, middle)
        in_burst = {str(request.index) for request in workload.requests if request.phase == "burst"}
        ended = simulate(system("static-dp", model, keep_times=False), workload.requests).ended
        found = mean(r.first_token_s - r.arrival_s for r in ended if r.request_id in in_burst)
        low, high = (low, middle) if found > wanted else (middle, high)
    faster = round((low * high) ** 0.5, 2)
    return faster, paper_workload(model, faster)


@cache
def burst_run(name: str, model: str) -> Simulated:
    """A system under the calibrated workload."""
    return run(name, model, calibrated(model)[1])


@cache
def low_run(name: str, model: str) -> Simulated:
    """A system in the paper's low phases alone, 2 to 5 requests per second, without a backlog from a burst."""
    return run(name, model, synthesise(Poisson(requests=600, rate_rps=3.5), SEED))


@cache
def peak_tokens_per_s(name: str, model: str) -> float:
    """Output tokens per second of a system that always has work: 2,000 of the paper's requests at once, the middle."""
    one = run(name, model, synthesise(Poisson(requests=2000, rate_rps=2000.0), SEED))
    ends = sorted(r.end_s for r in one.outcome.ended)
    begin_s, end_s = ends[len(ends) // 5], ends[3 * len(ends) // 5]
    times = one.results.event_s
    return float(((begin_s <= times) & (times < end_s)).sum() / (end_s - begin_s))


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown with columns paper, ours, ratio; below it why, for each number that differs by more than NOTABLE."""
    lines = ["| number | paper | ours | ours / paper | |", "|---|---|---|---|---|"]
    reasons = []
    for row in rows:
        paper = "not reported" if row.paper is None else number(row.paper)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        lines.append(f"| {row.name} | {paper} | {number(row.ours)} | {ratio} | {row.verdict} |")
        if row.ratio is not None and abs(row.ratio - 1) > NOTABLE:
            reasons.append(f"- {row.name}: {row.why or '**not explained yet**'}")
    return [*lines, "", *(["Why numbers differ by more than 20 %:", "", *reasons, ""] if reasons else [])]


def number(value: float) -> str:
    """Three digits, thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Any other table."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def write(name: str, title: str, lines: Sequence[str]) -> None:
    """One page of docs/results."""
    head = [f"# {title}", "", "Simulated: see [simulator.md](../simulator.md). Written by `make experiments`.", ""]
    (RESULTS / f"{name}.md").write_text("\n".join([*head, *lines]).rstrip() + "\n", encoding="utf-8")


def seconds(summary: Mapping[str, Any], phase: str, key: str) -> float:
    """A time of one phase."""
    return float(summary["phases"][phase][key]) / 1e3
