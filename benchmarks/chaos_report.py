"""What became of requests when an engine was lost, and how long it took; tables of it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos_cases import BLOCKS, LAYOUTS, PHASES, Case
from harness.chaos_load import Asked
from harness.storm_report import percentile

DETECTED_S, ORPHANED_S, GAP_S = 1.5, 3.0, 1.0
"""Bars: detection of a kill (p99), the first token of orphaned streams after it, the longest gap of
all others.
"""


@dataclass
class Outcome:
    """One case. Times in seconds.

    `orphaned_s`: from the loss to the next token, of each stream that lost its group or the KV that
    it was to pull, or that had no group at the time. `gaps_s`: of each other stream.
    """

    case: Case
    asked: Sequence[Asked]
    problems: list[str] = field(default_factory=list)
    detected_s: float | None = None
    back_s: float | None = None
    orphaned_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for one in self.asked:
            self.problems += [
                f"{one.name} ({one.job.name}): {what}" for what in (one.failed, one.wrong) if what
            ]

    @property
    def failed(self) -> int:
        """Requests that were failed."""
        return sum(one.failed is not None for one in self.asked)

    @property
    def wrong(self) -> int:
        """Requests whose tokens are not those of the same request undisturbed."""
        return sum(one.wrong is not None for one in self.asked)

    def measure(self, events: Callable[[str], list[dict[str, Any]]], losses: int) -> None:
        """Take times from what was noted. `losses`: how often the engine was lost; when it starts
        it has no streams.
        """
        sprung_s, lost_s = events("sprung")[0]["s"], events("lost")[0]["s"]
        self.detected_s, self.back_s = lost_s - sprung_s, events("back")[0]["s"] - sprung_s
        if others := {event["engine"] for event in events("lost")} - {self.case.victim}:
            self.problems.append(f"engines {sorted(others)} were lost too")
        if losses > 1:
            lost_again = [event["s"] for event in events("lost")]
            if len(lost_again) > 1:
                self.detected_s = lost_again[-1] - events("sprung")[-1]["s"]
        orphaned = {event["request"] for what in ("orphaned", "between") for event in events(what)}
        for one in self.asked:
            if any(f"{one.name}-" in request for request in orphaned):
                later = [at_s for at_s in one.answer.arrivals_s if at_s > lost_s]
                self.orphaned_s += [later[0] - lost_s] if later else []
            elif one.streams_at(sprung_s):
                self.gaps_s.append(one.worst_gap_s(sprung_s, sprung_s + self.back_s))

    @property
    def line(self) -> str:
        """For the log of a run."""
        times = {
            "detected": self.detected_s,
            "orphaned": max(self.orphaned_s, default=None),
            "back": self.back_s,
        }
        shown = ", ".join(f"{name} {s:.2f} s" for name, s in times.items() if s is not None)
        gap = f", worst gap {max(self.gaps_s):.2f} s" if self.gaps_s else ""
        return "\n  ".join(
            [f"{self.case.name}: {len(self.asked)} requests, {shown}{gap}", *self.problems]
        )


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Failure by layout, then over all, with the bars."""
    print(
        f"\nseconds, median / worst {'':20}{os.cpu_count()} processors, load "
        f"{os.getloadavg()[0]:.1f}"
    )
    names = ("detection", "first token of orphaned", "gap of others", "all back")
    print(
        f"{'phase, as, how':<36}{'layout':<9}{'n':>3}{'failed':>7}{'wrong':>6}"
        + "".join(f"{n:>22}" for n in names)
    )
    kinds = {(one.case.phase, one.case.role, one.case.how) for one in outcomes}
    for phase, role, how in sorted(kinds, key=lambda kind: (PHASES.index(kind[0]), *kind[1:])):
        for layout in LAYOUTS:
            kind = (phase, role, how, layout)
            rows = [
                o
                for o in outcomes
                if (o.case.phase, o.case.role, o.case.how, o.case.layout) == kind
            ]
            if rows:
                print(f"{f'{phase}, {role}, {how}':<36}{layout:<9}{_cells(rows)}")
    for how in sorted({one.case.how for one in outcomes}):
        print(
            f"{f'all, {how}':<36}{'':<9}{_cells([one for one in outcomes if one.case.how == how])}"
        )
    kills = [o.detected_s for o in outcomes if o.case.how == "kill" and o.detected_s is not None]
    print()
    _bar("detection of a kill, p99", percentile(kills, 0.99) if kills else None, DETECTED_S)
    roomy = [
        one for one in outcomes if one.case.phase not in BLOCKS
    ]  # else what is orphaned may wait for blocks
    _bar("orphaned streams go on, worst", max(_each(roomy, "orphaned_s"), default=None), ORPHANED_S)
    _bar("gap of other streams, worst", max(_each(outcomes, "gaps_s"), default=None), GAP_S)
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"FAILED {outcome.case.name}: {problem}")


def _each(outcomes: Iterable[Outcome], name: str) -> list[float]:
    return [value for outcome in outcomes for value in getattr(outcome, name)]


def _cells(rows: Sequence[Outcome]) -> str:
    failed, wrong = sum(one.failed for one in rows), sum(one.wrong for one in rows)
    detected = [one.detected_s for one in rows if one.detected_s is not None]
    back = [one.back_s for one in rows if one.back_s is not None]
    times = (detected, _each(rows, "orphaned_s"), _each(rows, "gaps_s"), back)
    return f"{len(rows):>3}{failed:>7}{wrong:>6}" + "".join(f"{_cell(each):>22}" for each in times)


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} / {max(values):.2f}" if values else "-"


def _bar(what: str, value: float | None, bar: float) -> None:
    if value is not None:
        print(f"{what}: {value:.2f} s (bar {bar:g} s: {'met' if value < bar else 'MISSED'})")
