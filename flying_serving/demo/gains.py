"""What `auto` gained against fixed layouts, in tables and words: pure functions of summaries and switch records."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from flying_serving.cli.render import UNKNOWN, degrees_text, milliseconds
from flying_serving.workload.model import Workload

Json = Mapping[str, Any]

FIGURES = (
    ("mean TTFT", "mean_ttft_ms", False),
    ("P90 TTFT", "p90_ttft_ms", False),
    ("median TPOT", "median_tpot_ms", False),
    ("tokens/s", "output_throughput_during", True),
)
"""Of each phase: name, key in a summary of `flying_serving.bench`, whether more is better."""
FIGURES_OF_ALL = (*FIGURES[:-1], ("tokens/s", "output_throughput", True))
NOTABLE = 0.05
"""A ratio is coloured if it differs from 1 by more than this."""


def gains_table(summaries: Mapping[str, Json]) -> Table:
    """One row for each figure of each phase: the first system, then each other with the first one's ratio to it."""
    first, *others = summaries
    table = Table(title="one replay each, times in ms; x: auto's figure over that of the column before it")
    table.title_justify = "left"
    table.add_column("requests")
    table.add_column("figure", no_wrap=True)
    table.add_column(first, justify="right")
    for name in others:
        table.add_column(name, justify="right")
        table.add_column("x", justify="right")
    for phase in (*summaries[first].get("phases", {}), None):
        rows = FIGURES_OF_ALL if phase is None else FIGURES
        for place, (title, key, more_is_better) in enumerate(rows):
            mine, *theirs = (_figure(summary, phase, key) for summary in summaries.values())
            cells = [_number(mine)]
            for value in theirs:
                cells += [_number(value), _coloured(ratio(mine, value), more_is_better=more_is_better)]
            table.add_row((phase or "all") if place == 0 else "", title, *cells)
        table.add_section()
    return table


def verdicts(summaries: Mapping[str, Json]) -> list[str]:
    """A line for each phase that names the better fixed layout by mean TTFT and sets `auto` beside it; one for all."""
    mine, *others = summaries
    lines = []
    for phase in summaries[mine].get("phases", {}):
        ttft = {name: _figure(summary, phase, "mean_ttft_ms") for name, summary in summaries.items()}
        known = sorted((value, name) for name in others if (value := ttft[name]) is not None)
        if not known or ttft[mine] is None:
            lines.append(f"{phase}: no request was served completely by {mine} or by the fixed layouts")
            continue
        best, name = known[0]
        rest = ", ".join(f"{other} {value:.0f} ms" for value, other in known[1:])
        against = f"{name} has the lower mean TTFT of the fixed layouts ({best:.0f} ms; {rest})"
        lines.append(f"{phase}: {against}; {mine} has {ttft[mine]:.0f} ms, {_times(ratio(ttft[mine], best))} that")
    whole = [
        f"{_times(ratio(_figure(summaries[mine], None, key), _figure(summaries[name], None, key)))} {name}'s {what}"
        for name in others
        for what, key in (("mean TTFT", "mean_ttft_ms"), ("tokens/s", "output_throughput"))
    ]
    return [*lines, f"all: {mine} has {', '.join(whole)}"]


def phase_lines(workload: Workload) -> list[tuple[float, str]]:
    """(seconds, line) for the beginning of each phase."""
    parts = [(phase, list(group)) for phase, group in itertools.groupby(workload.requests, lambda r: r.phase)]
    starts = [group[0].arrival_s for _, group in parts]
    ends = [*starts[1:], workload.duration_s]
    return [
        (start_s, f"{_at(start_s)}  {phase}: {len(group)} requests in {end_s - start_s:.0f} s")
        for (phase, group), start_s, end_s in zip(parts, starts, ends, strict=True)
    ]


def switch_lines(records: Iterable[Json], began_s: float) -> list[tuple[float, str]]:
    """(seconds, line) for each switch that has been made, with its prediction in request-seconds."""
    lines = []
    for record in records:
        if record["cutover_ms"] is not None:
            at_s = record["time"] - began_s
            layouts = f"{degrees_text(record['from'])} → {degrees_text(record['to'])} by {record['preempt']}"
            took = f"cutover {milliseconds(record['cutover_ms'])} ms"
            lines.append((at_s, f"{_at(at_s)}  {layouts}, {took}; {record['reason']}{_prediction(record)}"))
    return lines


def decisions_table(records: Sequence[Json], began_s: float) -> RenderableType:
    """One row for each switch that the policy made: what it predicted, and what came of it."""
    if not records:
        return "auto made no switch"
    table = Table(title="switches by auto (gain, cost: predicted, in request-seconds; the rest in ms)")
    table.title_justify = "left"
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("degrees", no_wrap=True)
    table.add_column("by", no_wrap=True)
    for name in ("gain", "cost", "in flight", "cutover", "drain", "worst gap"):
        table.add_column(name, justify="right")
    for record in records:
        table.add_row(
            UNKNOWN if record["cutover_ms"] is None else f"{record['time'] - began_s:.1f} s",
            f"{degrees_text(record['from'])} → {degrees_text(record['to'])}",
            record["preempt"],
            *(_number(record[f"predicted_{name}_request_s"]) for name in ("gain", "cost")),
            str(record["requests_in_flight"]),
            *(_number(record[name]) for name in ("cutover_ms", "drain_ms", "worst_token_gap_ms")),
        )
    return table


def ratio(mine: float | None, other: float | None) -> float | None:
    """`mine` over `other`; None if either was not measured."""
    return mine / other if mine is not None and other else None


def _figure(summary: Json, phase: str | None, key: str) -> float | None:
    """One figure of a phase, or of all requests."""
    part: Json = summary if phase is None else summary["phases"][phase]
    value: float | None = part[key]
    return value


def _prediction(record: Json) -> str:
    gain, cost = record["predicted_gain_request_s"], record["predicted_cost_request_s"]
    return "" if gain is None or cost is None else f"; predicted gain {gain:.1f}, cost {cost:.1f}"


def _number(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _times(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}x"


def _coloured(value: float | None, *, more_is_better: bool) -> str:
    """A ratio, green where the first system is better and red where it is worse."""
    if value is None or abs(value - 1) <= NOTABLE:
        return _times(value)
    colour = "green" if (value > 1) == more_is_better else "red"
    return f"[{colour}]{_times(value)}[/{colour}]"


def _at(seconds: float) -> str:
    return f"{seconds:6.1f} s"
