"""Tables for what a server reports: pure functions from JSON to rich renderables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from flying_serving.cli.checks import Finding

COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}
UNKNOWN = "-"


def layout_text(groups: Sequence[Sequence[int]]) -> str:
    """A layout as `flying-serving layout` takes it: `0,1 2 3`."""
    return " ".join(",".join(map(str, group)) for group in groups)


def degrees_text(groups: Sequence[Sequence[int]], devices: int = 1) -> str:
    """The degrees of a layout: `2+1+1`."""
    return "+".join(str(len(group) * devices) for group in groups)


def status(answer: Mapping[str, Any]) -> RenderableType:
    """The layout and what each degree holds, above a table of engines."""
    groups, devices = answer["layout"], answer["devices_per_engine"]
    requests = answer["requests"]
    capacity = ", ".join(f"{tokens} at degree {int(s) * devices}" for s, tokens in answer["capacity_tokens"].items())
    return Group(
        f"layout: [bold]{layout_text(groups)}[/bold] (degrees {degrees_text(groups, devices)})",
        f"requests: {requests['running']} running, {requests['held']} held until a layout suits them",
        f"KV tokens that one request may use: {capacity}",
        *(f"group size {size} is not offered: {reason}" for size, reason in answer["not_offered"].items()),
        _engines(answer),
        "lane n: requests running + waiting in groups of n engines, told by the first engine of each group",
    )


def _engines(answer: Mapping[str, Any]) -> Table:
    sizes = answer["group_sizes"]
    columns = [f"lent to {size}" for size in sizes[1:]] + [f"lane {size}" for size in sizes]
    table = _table("engine", "group", "blocks", "free", *columns, left=("group",))
    group_of = {engine: group for group in answer["layout"] for engine in group}
    for engine in answer["engines"]:
        number = engine["engine"]
        lent = [str(engine["lent_blocks"].get(str(size), UNKNOWN)) for size in sizes[1:]]
        lanes = [_lane(engine["lanes"].get(str(size))) for size in sizes]
        group = ",".join(map(str, group_of[number]))
        table.add_row(str(number), group, str(engine["blocks"]), str(engine["free_blocks"]), *lent, *lanes)
    return table


def _table(*columns: str, left: Collection[str]) -> Table:
    """A table of numbers, but for the columns of text, which stay `left` and on one line."""
    table = Table()
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name in left)
    return table


def _lane(lane: Mapping[str, int] | None) -> str:
    return UNKNOWN if lane is None else f"{lane['running']} + {lane['waiting']}"


def switches(records: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One row for each switch, times in ms."""
    if not records:
        return "no switches yet"
    text = ("from", "to", "mode")
    times = ("waited", "cutover", "step", "overhead", "work", "drain", "worst gap")
    table = _table("no.", *text, "in flight", *times, left=text)
    for record in records:
        keys = ("waited_for_idle_ms", "cutover_ms", "in_flight_step_ms", "overhead_ms", "work_ms", "drain_ms")
        times_ms = (record[key] for key in (*keys, "worst_token_gap_ms"))
        table.add_row(
            str(record["number"]),
            layout_text(record["from"]),
            layout_text(record["to"]),
            str(record["mode"]),
            str(record["requests_in_flight"]),
            *(UNKNOWN if value is None else f"{value:.1f}" for value in times_ms),
        )
    return Group(
        table,
        "times in ms, - while a switch goes on; step and overhead are the parts of cutover; work is processor time",
    )


def findings(found: Sequence[Finding]) -> Table:
    """What `doctor` found, one line each."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        colour = COLOURS[finding.state]
        table.add_row(f"[{colour}]{finding.state}[/{colour}]", finding.what, escape(finding.reason))
    return table
