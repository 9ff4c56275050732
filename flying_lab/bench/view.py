"""The output of `flying-serving bench`: progress while it runs, tables at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flying_lab.bench.client import Replay
from flying_lab.results.lag import MOST_LAG_MS

LATENCIES = (
    ("ttft", "TTFT"),
    ("tpot", "TPOT"),
    ("itl", "ITL"),
    ("e2el", "E2E"),
    ("queue_time", "queue time"),
)
STATISTICS = ("mean", "median", "p90", "p99")
ABSENT = "-"
WATCH_S = 0.5


class Watch:
    """One line that is drawn anew while requests are made and sent; nothing where there is no
    terminal.

    The client's own event loop draws it, so it is kept plain: drawing takes time from the streams.
    """

    def __init__(self, console: Console, requests: int) -> None:
        self._requests = requests
        self._live = (
            Live(console=console, auto_refresh=False, transient=True)
            if console.is_terminal
            else None
        )
        self._last = (0.0, 0)

    def made(self, bodies: int) -> None:
        """Show how many request bodies are made."""
        if bodies % 500 == 0:
            self._draw(f"making prompts {bodies}/{self._requests}")

    async def follow(self, replay: Replay) -> None:
        """Show the progress of a replay until it ends."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._show(replay)

    def _show(self, replay: Replay) -> None:
        at, tokens = replay.elapsed_s, replay.tokens
        rate = (tokens - self._last[1]) / max(1e-3, at - self._last[0])
        self._last = (at, tokens)
        failed = f", {replay.failed} failed" if replay.failed else ""
        self._draw(
            f"{at:.1f} s: {replay.sent}/{self._requests} sent, {replay.sent - replay.done} "
            "running, "
            f"{replay.done} done{failed}, {rate:.0f} tokens/s"
        )

    def _draw(self, line: str) -> None:
        if self._live is not None:
            self._live.update(Text(line), refresh=True)

    def __enter__(self) -> Watch:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()


def report(summary: dict[str, Any]) -> RenderableType:
    """Return the summary of a replay as tables, phases and priorities below."""
    parts: list[RenderableType] = [_totals(summary), _latencies(summary)]
    groups = [("phase", summary.get("phases")), ("priority", summary.get("priorities"))]
    parts += [_groups(title, found) for title, found in groups if found]
    parts += [Text(f"{count} x {error}") for error, count in summary["error_counts"].items()]
    return Group(*parts)


def lag_warning(summaries: Collection[Mapping[str, Any]]) -> str | None:
    """Return a warning about a client that did not keep up in some replays, None if it did in
    all.
    """
    behind = [summary for summary in summaries if summary["client_behind"]]
    if not behind:
        return None
    sending, reading = (
        max(one[f"p99_{name}_lag_ms"] for one in behind) for name in ("send", "loop")
    )
    where = f" in {len(behind)} of {len(summaries)} replays" if len(summaries) > 1 else ""
    return (
        f"the client fell behind{where}: at the 99th percentile it was {sending:.1f} ms late in "
        "sending and "
        f"{reading:.1f} ms late in reading, more than {MOST_LAG_MS:g} ms; the times measure the "
        "client too"
    )


def _totals(summary: dict[str, Any]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    outcome = ", ".join(f"{summary[name]} {name}" for name in ("completed", "failed", "unfinished"))
    rows = [
        ("requests", f"{summary['num_prompts']}: {outcome}"),
        ("duration", f"{summary['duration']:.2f} s"),
        ("requests/s", number(summary["request_throughput"])),
        (
            "output tokens/s",
            f"{number(summary['output_throughput'])}, at most {summary['max_output_tokens_per_s']}",
        ),
        ("prompt + output tokens/s", number(summary["total_token_throughput"])),
        ("at the same time", f"at most {summary['max_concurrent_requests']} requests"),
    ]
    if summary["request_goodput"] is not None:
        kept = f"{summary['slo_attainment']:.1%} of all requests"
        rows.append(("goodput requests/s", f"{number(summary['request_goodput'])}, {kept}"))
    if "deadline_attainment" in summary:
        rows.append(("deadlines kept", f"{summary['deadline_attainment']:.1%}"))
    lag = (
        f"p99 {summary['p99_send_lag_ms']:.2f} ms sending, "
        f"{summary['p99_loop_lag_ms']:.2f} ms reading"
    )
    rows.append(("the client's lag", lag))
    for name, value in rows:
        table.add_row(name, value)
    return table


def _latencies(summary: dict[str, Any]) -> Table:
    table = _table("", STATISTICS, "times in ms, of completed requests")
    for name, label in LATENCIES:
        values = [summary[f"{statistic}_{name}_ms"] for statistic in STATISTICS]
        if any(value is not None for value in values):
            table.add_row(label, *map(number, values))
    return table


def _table(first: str, headings: Sequence[str], title: str | None = None) -> Table:
    """Return a table of numbers, each row with its name in front."""
    table = Table(
        title=title and f"\n{title}",
        title_justify="left",
        title_style="",
        box=SIMPLE,
        padding=(0, 0, 0, 1),
    )
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _groups(title: str, groups: dict[str, dict[str, Any]]) -> Table:
    """Return a table with one row for each phase or priority."""
    table = _table(title, ("completed", "tokens/s", "TTFT mean", "p90", "TPOT median", "ITL p99"))
    for name, group in groups.items():
        tokens = group.get("output_throughput_during", group["output_throughput"])
        keys = ("mean_ttft_ms", "p90_ttft_ms", "median_tpot_ms", "p99_itl_ms")
        times = (group[key] for key in keys)
        completed = f"{group['completed']}/{group['num_prompts']}"
        table.add_row(name, completed, number(tokens), *map(number, times))
    return table


def systems(
    title: str, columns: Sequence[tuple[str, str]], summaries: Mapping[str, Mapping[str, Any]]
) -> Table:
    """Return a table with one row for each system; `columns`: (heading, key of its summary)."""
    headings = (heading.replace(" ", "\n") for heading, _ in columns)
    table = _table("system", ("completed", *headings), title)
    for name, summary in summaries.items():
        values = (number(summary[key]) for _, key in columns)
        table.add_row(name, f"{summary['completed']}/{summary['num_prompts']}", *values)
    return table


def number(value: float | None) -> str:
    """Return a number for a table, four or five characters up to 99,999, so that a table fits 80
    columns.
    """
    if not isinstance(value, float):
        return ABSENT if value is None else str(value)
    return next(
        (text for digits in (2, 1) if len(text := f"{value:.{digits}f}") <= 5), f"{value:.0f}"
    )
