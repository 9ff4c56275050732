"""What a storm of switches was: outcomes, switch costs, and what the processes held before and
after.
"""

from __future__ import annotations

import math
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from flying_serving.config import MODES
from harness.live import Server
from harness.storm_bounds import Bounds

MEMORY_SHARE, MEMORY_BYTES, COUNT_SLACK = 0.03, 8 << 20, 2
COLUMNS = {  # of the table: field of a switch -> width
    "cutover_ms": 19,
    "in_flight_step_ms": 20,
    "overhead_ms": 19,
    "work_ms": 18,
    "drain_ms": 23,
    "worst_token_gap_ms": 21,
    "waited_for_idle_ms": 22,
}
TARGETS_MS = {
    "overhead median": 2.0,
    "overhead p99": 10.0,
    "cutover less in-flight step, median": 2.0,
}


@dataclass(frozen=True)
class Sample:
    """What one process holds, while nothing runs."""

    process: str
    rss: int
    uss: int
    pss: int
    fds: int
    threads: int


@dataclass
class Report:
    """What a storm was."""

    switches: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """By number of switches so far."""
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    """Of engines, each in a sentence."""
    worst_logprob: float = 0.0
    worst_lead: float = 0.0
    """Of a token over the one that was sampled in its place, where a stream parted."""
    bounds: Bounds = field(default_factory=Bounds)
    tokens: int = 0
    seconds: float = 0.0


def sample_processes(server: Server) -> list[Sample]:
    """What the API server and each engine hold."""
    root = psutil.Process(server.process.pid)
    samples = []
    children = sorted(root.children(recursive=True), key=lambda process: process.pid)
    engines = [
        process for process in children if "resource_tracker" not in " ".join(process.cmdline())
    ]
    for name, process in [
        ("API server", root),
        *((f"engine {i}", p) for i, p in enumerate(engines)),
    ]:
        memory = process.memory_full_info()
        counts = process.num_fds(), process.num_threads()
        samples.append(Sample(name, memory.rss, memory.uss, memory.pss, *counts))
    return samples


def growth(before: Sequence[Sample], after: Sequence[Sample]) -> list[str]:
    """What has grown beyond what is allowed.

    That is resident memory by process, and the sum of what belongs to each alone or in shares.
    Shares move: a page that an engine was forked with counts more for the server once the engine
    has written to its own copy.
    """
    problems = []
    memory = [sum(sample.pss for sample in samples) for samples in (before, after)]
    if memory[1] - memory[0] > MEMORY_SHARE * memory[0]:
        problems.append(
            f"memory of all processes grew from {memory[0] >> 20} to {memory[1] >> 20} MiB"
        )
    if [s.process for s in before] != [s.process for s in after]:
        problems.append(
            f"processes were {[s.process for s in before]}, are {[s.process for s in after]}"
        )
    for old, new in zip(before, after, strict=False):
        if new.rss - old.rss > max(MEMORY_BYTES, MEMORY_SHARE * old.rss):
            problems.append(f"{old.process}: rss grew by {(new.rss - old.rss) / 2**20:.1f} MiB")
        for what in ("fds", "threads"):
            if abs(getattr(new, what) - getattr(old, what)) > COUNT_SLACK:
                problems.append(
                    f"{old.process}: {what} were {getattr(old, what)}, are {getattr(new, what)}"
                )
    return problems


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def cutover_beyond_step(switch: dict[str, Any]) -> float:
    """Milliseconds from the order to the new layout, less the step that was under way."""
    return float(switch["cutover_ms"] - switch["in_flight_step_ms"])


def acceptance(switches: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The figures that TARGETS_MS bounds."""
    overheads = [switch["overhead_ms"] for switch in switches]
    at_once = [cutover_beyond_step(s) for s in switches if s["mode"] != "sequential"] or [0.0]
    figures = (
        statistics.median(overheads),
        percentile(overheads, 0.99),
        statistics.median(at_once),
    )
    return dict(zip(TARGETS_MS, figures, strict=True))


def print_report(report: Report) -> None:
    """Switch costs by way of switching, processes, outcomes, failures."""
    outcomes = ", ".join(f"{count} {what}" for what, count in sorted(report.outcomes.items()))
    print(
        f"\n{len(report.switches)} switches in {report.seconds:.0f} s; streams: {outcomes}; "
        f"{report.tokens} tokens"
    )
    print(
        f"largest difference of a logprob from the reference: {report.worst_logprob:.1e} (bound "
        f"{report.bounds.logprob:.1e}); largest lead where a stream parted: "
        f"{report.worst_lead:.1e} (bound {report.bounds.lead:.1e}); bound of the mean of a stream: "
        f"{report.bounds.mean:.1e}"
    )
    print(
        f"\nmilliseconds, median / p99 / max {'':26}{os.cpu_count()} processors, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    print(
        f"{'mode':<11}{'n':>4}"
        + "".join(f"{c.removesuffix('_ms'):>{w}}" for c, w in COLUMNS.items())
    )
    for mode in (*MODES, "all"):
        rows = [s for s in report.switches if mode in ("all", s["mode"])]
        cells = {c: _cell([s[c] for s in rows if s[c] is not None]) for c in COLUMNS}
        print(
            f"{mode:<11}{len(rows):>4}"
            + "".join(f"{cell:>{COLUMNS[c]}}" for c, cell in cells.items())
        )
    print()
    for name, value in acceptance(report.switches).items():
        print(
            f"{name}: {value:.2f} ms (target < {TARGETS_MS[name]:g} ms: "
            f"{_verdict(value < TARGETS_MS[name])})"
        )
    first, last = sorted(report.samples)
    print(
        f"\n{'process':<12}"
        + "".join(f"{w:>20}" for w in ("rss MiB", "uss MiB", "pss MiB", "fds", "threads"))
    )
    for old, new in zip(report.samples[first], report.samples[last], strict=True):
        pairs = [
            f"{getattr(old, w) / 2**20:.1f} -> {getattr(new, w) / 2**20:.1f}"
            for w in ("rss", "uss", "pss")
        ]
        pairs += [f"{getattr(old, w)} -> {getattr(new, w)}" for w in ("fds", "threads")]
        print(f"{old.process:<12}" + "".join(f"{pair:>20}" for pair in pairs))
    print(f"(after switch {first} and after switch {last}, idle)")
    for loss in report.losses:
        print(loss)
    for failure in report.failures[:50]:
        print(f"FAILED {failure}")


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "-"
    figures = statistics.median(values), percentile(values, 0.99), max(values)
    return " / ".join(f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in figures)


def _verdict(kept: bool) -> str:
    return "met" if kept else "MISSED"
