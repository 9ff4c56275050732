"""Tables of the reports of a server: pure functions from JSON to rich renderables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flying_serving.server.figures.notes import problems

if TYPE_CHECKING:
    from flying_serving.cli.checks import Finding

COLOURS = {"ok": "green", "warn": "yellow", "bad": "red"}
UNKNOWN = "-"
PREDICTED = ("predicted_gain", "least_gain", "predicted_cost")
MEASURED = (
    "waited_for_idle",
    "cutover",
    "in_flight_step",
    "overhead",
    "work",
    "drain",
    "worst_token_gap",
)


def layout_text(groups: Sequence[Sequence[int]]) -> str:
    """Return a layout as `flying-serving layout` takes it: `0,1 2 3`."""
    return " ".join(",".join(map(str, group)) for group in groups)


def degrees_text(groups: Sequence[Sequence[int]], devices: int = 1) -> str:
    """Return the degrees of a layout: `2+1+1`."""
    return "+".join(str(len(group) * devices) for group in groups)


def status(answer: Mapping[str, Any]) -> RenderableType:
    """Return the layout and the capacity of each degree, above a table of engines."""
    groups, devices = answer["layout"], answer["devices_per_engine"]
    requests = answer["requests"]
    capacity = ", ".join(
        f"{tokens} at degree {int(s) * devices}" for s, tokens in answer["capacity_tokens"].items()
    )
    return Group(
        *_problems(answer),
        *_draining(answer["load"]),
        f"layout: [bold]{layout_text(groups)}[/bold] (degrees {degrees_text(groups, devices)})",
        f"requests: {requests['running']} running, {requests['waiting']} waiting for a group",
        f"KV tokens that one request may use: {capacity}",
        *_why_kept(answer["last_decision"]),
        *_kept_room(answer["kept_room"]),
        *(
            f"group size {size} is not offered: {reason}"
            for size, reason in answer["not_offered"].items()
        ),
        _engines(answer),
        "lane n: requests running + waiting in groups of n engines, told by the first engine of "
        "each group",
    )


def drain(answer: Mapping[str, Any]) -> RenderableType:
    """Return a line on whether the server takes requests, and how many it has."""
    if not answer["draining"]:
        return f"takes new requests; {answer['requests']} are under way"
    return f"draining: {answer['requests']} requests are left" + (
        "; ready to stop" if answer["ready_to_stop"] else ""
    )


def _problems(answer: Mapping[str, Any]) -> list[Text]:
    """Return a line for each engine that does not serve: since when and why."""
    return [
        Text(f"degraded since {_clock(one.since)}: {one.text}", style="red")
        for one in problems(answer)
    ]


def _draining(load: Mapping[str, Any]) -> list[Text]:
    """Return a line if the node takes no new requests, and whether it may be stopped."""
    if not load["draining"]:
        return []
    return [
        Text(
            "draining: ready to stop" if load["ready_to_stop"] else "draining: requests run",
            style="yellow",
        )
    ]


def _clock(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).astimezone().isoformat(" ", "seconds")


def _why_kept(last: Mapping[str, Any] | None) -> list[str]:
    """Return why the layout is kept, if the policy has compared it with others and found none that
    gains enough.
    """
    if last is None or last["is_made"] or last["least_gain_request_s"] is None:
        return []
    other, unsure_at = layout_text(last["to"]), last["unsure_at_requests_per_s"]
    gain, needed = (
        figure(last["predicted_gain_request_s"], 2),
        figure(last["least_gain_request_s"], 2),
    )
    if unsure_at is not None:
        return [
            f"stays: {other} would gain {gain} request-s, but too little if "
            f"{figure(unsure_at, 2)} requests/s arrive"
        ]
    return [f"stays: {other} would gain {gain} request-s and has to gain more than {needed}"]


def _kept_room(kept: Mapping[str, Any] | None) -> list[str]:
    """Return which engines do not fill up, as a long request may come."""
    if kept is None:
        return []
    engines = ", ".join(map(str, kept["engines"]))
    return [f"engines {engines} keep room for a request of {kept['tokens']} tokens"]


def _engines(answer: Mapping[str, Any]) -> Table:
    sizes = answer["group_sizes"]
    columns = [f"lent to {size}" for size in sizes[1:]] + [f"lane {size}" for size in sizes]
    table = _table("engine", "group", "blocks", "free", *columns, left=("group",))
    group_of = {engine: group for group in answer["layout"] for engine in group}
    for engine in answer["engines"]:
        number = engine["engine"]
        lent = [str(engine["lent_blocks"].get(str(size), UNKNOWN)) for size in sizes[1:]]
        lanes = [_lane(engine["lanes"].get(str(size))) for size in sizes]
        # one that is back joins in a moment
        group = ",".join(map(str, group_of.get(number, ()))) or UNKNOWN
        table.add_row(
            str(number), group, str(engine["blocks"]), str(engine["free_blocks"]), *lent, *lanes
        )
    for problem in problems(answer):
        table.add_row(str(problem.engine), problem.state, *[UNKNOWN] * (2 + len(columns)))
    return table


def _table(*columns: str, left: Collection[str]) -> Table:
    """Return a table of numbers, except for the columns of text, which stay `left` and on one
    line.
    """
    table = Table()
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name in left)
    return table


def _lane(lane: Mapping[str, int] | None) -> str:
    return UNKNOWN if lane is None else f"{lane['running']} + {lane['waiting']}"


def switches(records: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return two rows for each switch: the prediction, in request-seconds, and the measurement, in
    ms.
    """
    if not records:
        return "no switches yet"
    text = ("from", "to", "mode", "reason")
    why = _table("no.", *text, "gain", "needed", "cost", "share", "seen", left=text)
    times = ("waited", "cutover", "step", "overhead", "work", "drain", "worst gap")
    took = _table("no.", "in flight", *times, left=())
    for record in records:
        layouts = layout_text(record["from"]), layout_text(record["to"])
        predicted = (figure(record[f"{name}_request_s"], 2) for name in PREDICTED)
        shares = (percent(record[f"{name}_gain_share"]) for name in ("predicted", "seen"))
        told = (*layouts, record["mode"], escape(record["reason"]))
        why.add_row(str(record["number"]), *told, *predicted, *shares)
        measured = (figure(record[f"{name}_ms"]) for name in MEASURED)
        took.add_row(str(record["number"]), str(record["requests_in_flight"]), *measured)
    return Group(
        why,
        "predicted request-seconds; a switch for load has to gain more than is needed, - is "
        "shown for other reasons; share is the gain less the cost, in request-seconds of staying, "
        "and seen is what became of it when the horizon had passed",
        took,
        "times in ms, - while a switch goes on; step and overhead are the parts of cutover; work "
        "is processor time",
    )


def figure(value: float | None, digits: int = 1) -> str:
    """Return a time or a sum of times as text; `-` while there is none."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def percent(share: float | None) -> str:
    """Return a share as text; `-` while there is none."""
    return UNKNOWN if share is None else f"{share:+.0%}"


def findings(found: Sequence[Finding]) -> Table:
    """Return a table of the findings of `doctor`, one line each."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in found:
        colour = COLOURS[finding.state]
        table.add_row(f"[{colour}]{finding.state}[/{colour}]", finding.what, escape(finding.reason))
    return table
