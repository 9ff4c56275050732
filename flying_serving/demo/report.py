"""The demo's numbers and tables: pure functions of what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

from flying_serving.cli.render import degrees_text, milliseconds
from flying_serving.demo.load import TimedStream

Groups = list[list[int]]


@dataclass(frozen=True)
class Window:
    """A time in which one layout was in force."""

    groups: Groups
    begin_s: float
    end_s: float

    def holds(self, moment_s: float) -> bool:
        """Whether a moment lies in it."""
        return self.begin_s <= moment_s < self.end_s


@dataclass(frozen=True)
class Figures:
    """What streams got while one layout was in force. None: nothing was measured."""

    seconds: float
    requests: int
    ttft_ms: float | None
    tpot_ms: float | None
    tokens_per_s: float


def measure(windows: Sequence[Window], streams: Iterable[TimedStream]) -> Figures:
    """Figures over all windows of one layout.

    Medians are over the requests that were sent in a window. Time per output token: the time between a stream's first
    and last arrival in that window, over the tokens that came after the first arrival. Tokens per second count every
    stream, those of earlier layouts too.
    """
    first: list[float] = []
    per_token: list[float] = []
    tokens = requests = 0
    for stream in streams:
        for window in windows:
            inside = [arrival for arrival in stream.arrivals if window.holds(arrival[0])]
            tokens += sum(count for _, count in inside)
            if window.holds(stream.sent_s):
                requests += 1
                first += [stream.arrivals[0][0] - stream.sent_s] if stream.arrivals else []
                later = sum(count for _, count in inside[1:])
                per_token += [(inside[-1][0] - inside[0][0]) / later] if later else []
    seconds = sum(window.end_s - window.begin_s for window in windows)
    return Figures(
        seconds=seconds,
        requests=requests,
        ttft_ms=median(first) * 1e3 if first else None,
        tpot_ms=median(per_token) * 1e3 if per_token else None,
        tokens_per_s=tokens / seconds,
    )


def layouts_table(windows: Sequence[Window], streams: Sequence[TimedStream]) -> Table:
    """One row for each layout."""
    table = Table(title="streams (TTFT, TPOT: medians in ms)", title_justify="left")
    table.add_column("degrees", no_wrap=True)
    for name in ("seconds", "requests", "TTFT", "TPOT", "tokens/s"):
        table.add_column(name, justify="right")
    by_layout: dict[str, list[Window]] = {}
    for window in windows:
        by_layout.setdefault(degrees_text(window.groups), []).append(window)
    for name, parts in by_layout.items():
        figures = measure(parts, streams)
        table.add_row(
            name,
            f"{figures.seconds:.1f}",
            str(figures.requests),
            milliseconds(figures.ttft_ms),
            milliseconds(figures.tpot_ms),
            f"{figures.tokens_per_s:.0f}",
        )
    return table


def switches_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """One row for each switch."""
    table = Table(title="switches in ms (step: of cutover, the rest of a step under way)")
    table.title_justify = "left"
    table.add_column("degrees", no_wrap=True)
    table.add_column("mode")
    for name in ("in flight", "cutover", "step", "drain", "worst gap"):
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(
            f"{degrees_text(record['from'])} → {degrees_text(record['to'])}",
            record["mode"],
            str(record["requests_in_flight"]),
            milliseconds(record["cutover_ms"]),
            milliseconds(record["in_flight_step_ms"]),
            milliseconds(record["drain_ms"]),
            milliseconds(record["worst_token_gap_ms"]),
        )
    return table


def problems(streams: Sequence[TimedStream], records: Sequence[Mapping[str, Any]], expected_switches: int) -> list[str]:
    """Everything that was not right, in words; nothing if all was."""
    found = [stream.problem for stream in streams if stream.problem is not None]
    if not streams:
        found.append("no request was sent")
    if len(records) != expected_switches:
        found.append(f"{len(records)} switches recorded, {expected_switches} made")
    found += [
        f"switch {record['number']} has no {name}"
        for record in records
        for name in ("cutover_ms", "drain_ms")
        if record[name] is None
    ]
    return found
