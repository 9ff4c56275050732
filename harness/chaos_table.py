"""The data file of `benchmarks/chaos.py`, and the short tables of it.

The file has a row for each phase, role, signal and layout in which an engine was lost. The short
tables are the totals by phase, and every row that misses a bar. Times are in seconds.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

NOTICED_S, GOES_ON_S, GAP_S = 1.5, 3.0, 1.0
"""Bars: a kill is noticed (p99), the first token of streams that lost their group, the longest gap
of all other streams.
"""
KEY = ("phase", "as", "how", "layout")
COUNTS = ("cases", "failed", "wrong")
TIMES = ("noticed", "goes on", "gap of others", "back")
COLUMNS = (
    *KEY,
    *COUNTS,
    *(f"{time}, {part} (s)" for time in TIMES for part in ("median", "worst")),
)
ROW_HEADINGS = (*KEY, *COUNTS, *TIMES)
MISS_HEADINGS = (*ROW_HEADINGS, "missed")
WORST_HEADINGS = ("time", "how", "worst", "bar", "row")
TOTAL_HEADINGS = ("phase", "how", "rows", *COUNTS, *TIMES, "rows with a miss")
ALL = "all"
"""The phase, or the signal, of a total over all of them."""


class Spread(NamedTuple):
    """The median and the worst of some times, in seconds."""

    median_s: float
    worst_s: float


@dataclass(frozen=True)
class LossRow:
    """All cases of one phase, role, signal and layout.

    Args:
        phase: in which the engine was lost.
        role: what the engine was in its group: leader, member, or owner of KV that is pulled.
        signal: `kill` or `freeze`.
        layout: of the engines.
        cases: how many engines were lost.
        failed, wrong: requests that failed, and requests with a wrong token.
        times: by name of TIMES; None if no case has such a time.
    """

    phase: str
    role: str
    signal: str
    layout: str
    cases: int
    failed: int
    wrong: int
    times: dict[str, Spread | None]

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Return the cells that tell the row from all others."""
        return self.phase, self.role, self.signal, self.layout

    @property
    def missed(self) -> list[str]:
        """Return the names of the columns that miss their bar; a request that failed or has a wrong
        token is a miss.
        """
        counts = {"failed": self.failed, "wrong": self.wrong}
        missed_counts = [name for name, count in counts.items() if count]
        missed_times = [
            name
            for name, bar_s in bars_s(self.signal).items()
            if (spread := self.times[name]) and spread.worst_s >= bar_s
        ]
        return missed_counts + missed_times


def bars_s(signal: str) -> dict[str, float]:
    """Return the bars of times, in seconds, by name of TIMES.

    A frozen engine is noticed after the timeout of the server, for which there is no bar.
    """
    bars = {"noticed": NOTICED_S} if signal == "kill" else {}
    return bars | {"goes on": GOES_ON_S, "gap of others": GAP_S}


def write(path: Path, rows: Iterable[LossRow]) -> None:
    """Write the data file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for row in rows:
            spreads = [row.times[name] or ("", "") for name in TIMES]
            times = [value for spread in spreads for value in spread]
            table.writerow([*row.key, row.cases, row.failed, row.wrong, *map(_number, times)])


def read(path: Path) -> list[LossRow]:
    """Read the data file. Raises ValueError if it does not have the columns of this version."""
    with path.open(encoding="utf-8", newline="") as file:
        header, *lines = csv.reader(file)
    if tuple(header) != COLUMNS:
        raise ValueError(f"{path}: the columns are not {', '.join(COLUMNS)}")
    return [_row(cells) for cells in lines]


def _row(cells: Sequence[str]) -> LossRow:
    phase, role, signal, layout, cases, failed, wrong, *values = cells
    pairs = zip(values[::2], values[1::2], strict=True)
    spreads = [Spread(float(median), float(worst)) if worst else None for median, worst in pairs]
    times = dict(zip(TIMES, spreads, strict=True))
    return LossRow(phase, role, signal, layout, int(cases), int(failed), int(wrong), times)


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2f}"


def total_cells(rows: Sequence[LossRow]) -> list[list[str]]:
    """Return the totals by phase and signal, then by signal, then of all rows.

    The time of a total is the worst of its rows.
    """
    if not rows:
        return []

    kinds = list(dict.fromkeys((row.phase, row.signal) for row in rows))
    signals = list(dict.fromkeys(signal for _, signal in kinds))
    kinds += [*((ALL, signal) for signal in signals), (ALL, ALL)]
    return [_total(kind, [row for row in rows if _is_of(row, kind)]) for kind in kinds]


def _is_of(row: LossRow, kind: tuple[str, str]) -> bool:
    phase, signal = kind
    return phase in (ALL, row.phase) and signal in (ALL, row.signal)


def _total(kind: tuple[str, str], rows: Sequence[LossRow]) -> list[str]:
    counts = [
        len(rows),
        sum(row.cases for row in rows),
        sum(row.failed for row in rows),
        sum(row.wrong for row in rows),
    ]
    times = [_seconds(worst_row(rows, name).times[name]) for name in TIMES]
    missing = sum(bool(row.missed) for row in rows)
    return [*kind, *map(str, counts), *times, str(missing)]


def _seconds(spread: Spread | None) -> str:
    return f"{spread.worst_s:.2f}" if spread else "-"


def worst_row(rows: Iterable[LossRow], name: str) -> LossRow:
    """Return the row with the worst time of a name of TIMES; any row if none has such a time.

    Raises ValueError if there is no row.
    """
    return max(rows, key=lambda row: spread.worst_s if (spread := row.times[name]) else -1.0)


def worst_cells(rows: Sequence[LossRow]) -> list[list[str]]:
    """Return the row with the worst time of each kind, by signal."""
    cells = []
    for name in TIMES:
        for signal in dict.fromkeys(row.signal for row in rows):
            worst = worst_row((row for row in rows if row.signal == signal), name)
            bar_s = bars_s(signal).get(name)
            bar = "" if bar_s is None else f"{bar_s:g}"
            cells.append([name, signal, _seconds(worst.times[name]), bar, ", ".join(worst.key)])
    return cells


def miss_cells(rows: Iterable[LossRow]) -> list[list[str]]:
    """Return every row that misses a bar, with the names of the columns that miss it."""
    return [[*row_cells(row), ", ".join(row.missed)] for row in rows if row.missed]


def row_cells(row: LossRow) -> list[str]:
    """Return one row as a page shows it: median / worst of each time."""
    counts = (row.cases, row.failed, row.wrong)
    return [*row.key, *map(str, counts), *(_both(row.times[name]) for name in TIMES)]


def _both(spread: Spread | None) -> str:
    return f"{spread.median_s:.2f} / {spread.worst_s:.2f}" if spread else "-"
