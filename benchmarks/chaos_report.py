"""What became of requests when an engine was lost, and how long it took."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.chaos_cases import BLOCKS, LAYOUTS, PHASES, Case
from harness.chaos_load import Asked
from harness.chaos_table import (
    GAP_S,
    GOES_ON_S,
    MISS_HEADINGS,
    NOTICED_S,
    TIMES,
    TOTAL_HEADINGS,
    LossRow,
    Spread,
    miss_cells,
    total_cells,
)
from harness.storm_report import percentile


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


def loss_rows(outcomes: Sequence[Outcome]) -> list[LossRow]:
    """Return a row for each phase, role, signal and layout, in the order of PHASES and LAYOUTS."""
    by_kind: dict[tuple[str, str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        case = outcome.case
        kind = (case.phase, case.role, case.how, case.layout)
        by_kind.setdefault(kind, []).append(outcome)

    layouts = list(LAYOUTS)
    return [
        _row(kind, by_kind[kind])
        for kind in sorted(
            by_kind, key=lambda kind: (PHASES.index(kind[0]), *kind[1:3], layouts.index(kind[3]))
        )
    ]


def _row(kind: tuple[str, str, str, str], outcomes: Sequence[Outcome]) -> LossRow:
    failed = sum(outcome.failed for outcome in outcomes)
    wrong = sum(outcome.wrong for outcome in outcomes)
    noticed = [outcome.detected_s for outcome in outcomes if outcome.detected_s is not None]
    back = [outcome.back_s for outcome in outcomes if outcome.back_s is not None]
    seconds = (noticed, _each(outcomes, "orphaned_s"), _each(outcomes, "gaps_s"), back)
    times = dict(zip(TIMES, map(_spread, seconds), strict=True))
    return LossRow(*kind, len(outcomes), failed, wrong, times)


def _spread(seconds: Sequence[float]) -> Spread | None:
    """Return the two figures as the data file has them, so that what misses a bar misses it there
    too.
    """
    if not seconds:
        return None
    return Spread(round(statistics.median(seconds), 2), round(max(seconds), 2))


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print the totals, every row that misses a bar, the bars over all cases, and each problem."""
    rows = loss_rows(outcomes)
    print(f"\nseconds; {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}\n")
    _print_table(TOTAL_HEADINGS, total_cells(rows))
    if misses := miss_cells(rows):
        _print_table(MISS_HEADINGS, misses)

    kills = [o.detected_s for o in outcomes if o.case.how == "kill" and o.detected_s is not None]
    _bar("detection of a kill, p99", percentile(kills, 0.99) if kills else None, NOTICED_S)
    # In the other phases a stream without a group may have to wait for blocks.
    roomy = [outcome for outcome in outcomes if outcome.case.phase not in BLOCKS]
    _bar("orphaned streams go on, worst", max(_each(roomy, "orphaned_s"), default=None), GOES_ON_S)
    _bar("gap of other streams, worst", max(_each(outcomes, "gaps_s"), default=None), GAP_S)
    for outcome in outcomes:
        for problem in outcome.problems:
            print(f"FAILED {outcome.case.name}: {problem}")


def _print_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
    for line in (headings, *lines):
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
    print()


def _each(outcomes: Iterable[Outcome], name: str) -> list[float]:
    return [value for outcome in outcomes for value in getattr(outcome, name)]


def _bar(what: str, value: float | None, bar: float) -> None:
    if value is not None:
        print(f"{what}: {value:.2f} s (bar {bar:g} s: {'met' if value < bar else 'MISSED'})")
