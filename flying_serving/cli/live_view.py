"""The live view in a terminal: from the JSON of `GET /flying/view` to renderables of rich."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from rich.box import ROUNDED
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flying_serving.server.figures.notes import NOTED_BYTES, problems

COLOURS = {1: "cyan", 2: "blue", 4: "yellow"}
WIDEST_COLOUR = "magenta"
SHOWN_SWITCHES = 8
UNKNOWN = "–"
CELL = 17
"""Columns of one engine in its group's box."""
BAR, FIRST, SECOND = 24, "green", "magenta"
"""Columns of a split request's bar, and the colours of its groups."""


def top(state: Mapping[str, Any]) -> RenderableType:
    """Return the whole view: the server, its groups, the last switches."""
    groups = [_group(state, group) for group in state["groups"]]
    below = [*_others(state), *_splits(state), _switches(state)]
    return Group(_server(state), *_problems(state), Columns(groups, padding=(0, 1)), *below)


def _server(state: Mapping[str, Any]) -> RenderableType:
    rolling, pool = state["rolling"], state["pool"]
    degrees = "+".join(str(group["degree"]) for group in state["groups"])
    waits = f"{pool['requests']} wait" if pool["requests"] else "none waits"
    if pool["requests"]:
        waits += f" (oldest {duration(pool['oldest_s'] * 1e3)}, {pool['urgent']} urgent)"
    return Text.from_markup(
        f"[bold]{escape(str(state['model']))}[/bold]  policy {state['policy']}, layout "
        f"[bold]{degrees}[/bold]"
        f"{' (switching)' if state['changing'] else ''}\n"
        f"requests: [bold]{state['running']}[/bold] run, {waits}\n"
        f"last {rolling['window_s']:g} s: TTFT [bold]{duration(rolling['ttft_mean_ms'])}[/bold] "
        f"(P90 {duration(rolling['ttft_p90_ms'])}), TPOT "
        f"[bold]{duration(rolling['tpot_mean_ms'])}[/bold] "
        f"(longest gap {duration(rolling['worst_gap_ms'])}), "
        f"[bold]{rolling['tokens_per_s']:.0f}[/bold] tokens/s"
    )


def _problems(state: Mapping[str, Any]) -> list[RenderableType]:
    """Return a line for each engine that does not serve."""
    return [
        Text(f"degraded: {one.text}, {_ago(state['time'] - one.since)} ago", style="red")
        for one in problems(state)
    ]


def _group(state: Mapping[str, Any], group: Mapping[str, Any]) -> Panel:
    figures, engines = group["figures"], group["engines"]
    colour = _colour(group["degree"])
    width = CELL * len(engines)
    cells = Table.grid(padding=0)
    for _ in engines:
        cells.add_column(width=CELL)
    usage = [state["engines"][engine]["kv_usage"] for engine in engines]
    shares = [UNKNOWN if kv is None else f"{kv:.0%}" for kv in usage]
    cells.add_row(
        *(f"[bold]{engine}[/bold]  KV {kv}" for engine, kv in zip(engines, shares, strict=True))
    )
    cells.add_row(*(_bar(kv or 0.0, CELL - 1, colour) for kv in usage))
    memory = [state["engines"][engine]["memory"] for engine in engines]
    for name, word in NOTED_BYTES.items():
        if any(one and one[name] for one in memory):
            cells.add_row(*(f"{room(one[name])} {word}" if one else "" for one in memory))
    content = Group(
        f"{group['requests']} of {state['max_num_seqs']} requests",
        _bar(group["requests"] / state["max_num_seqs"], width - 1, colour),
        cells,
        f"{figures['tokens_per_s']:.0f} tok/s" if width < 2 * CELL else _figures(figures),
    )
    return Panel(
        content,
        title=f"TP {group['degree']}",
        title_align="left",
        border_style=colour,
        box=ROUNDED,
        expand=False,
    )


def _figures(figures: Mapping[str, Any]) -> str:
    times = f"TPOT {duration(figures['tpot_mean_ms'])}, TTFT {duration(figures['ttft_mean_ms'])}"
    return f"{figures['tokens_per_s']:.0f} tok/s, {times}"


def _bar(share: float, width: int, colour: str) -> Text:
    full = min(width, ceil(share * width))
    return Text("━" * full, style=colour) + Text("─" * (width - full), style="dim")


def _others(state: Mapping[str, Any]) -> list[RenderableType]:
    """Return a line for each group that has requests and is not in the layout."""
    found: list[RenderableType] = []
    for group in state["others"]:
        members = _members(group["engines"])
        found.append(
            f"{group['requests']} requests at TP {group['degree']} on {members}, {group['state']}"
        )
    return found


def _splits(state: Mapping[str, Any]) -> list[RenderableType]:
    """Return the number of requests that two groups share, and a bar for each, coloured by each
    group's share of it.
    """
    splits = state["splits"]
    if not splits["begun"]:
        return []
    found: list[RenderableType] = [
        f"{splits['now']} requests are shared by two groups, {splits['begun']} so far"
    ]
    for split in splits["shown"]:
        at, rest = split["at"], split["rest"]
        width = min(BAR - 1, max(1, round(BAR * at / (at + rest))))
        bar = Text("━" * width, style=FIRST) + Text("━" * (BAR - width), style=SECOND)
        line = Text.assemble(
            f"{_members(split['first'])}: {at} tokens ",
            bar,
            f" {_members(split['second'])}: {rest}",
        )
        found.append(line)
    return found


def _members(engines: Sequence[int]) -> str:
    return f"engine{'s' if len(engines) > 1 else ''} {', '.join(map(str, engines))}"


def _switches(state: Mapping[str, Any]) -> RenderableType:
    if not state["switches"]:
        return "no switch yet"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("ago", "from", "to", "mode"):
        table.add_column(name, no_wrap=True, justify="right" if name == "ago" else "left")
    for name in ("cutover", "drain", "worst gap", "gain", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for switch in reversed(state["switches"][-SHOWN_SWITCHES:]):
        problem, cost = switch["problem"], switch["predicted_cost_request_s"]
        gain = switch["predicted_gain_request_s"]
        table.add_row(
            _ago(state["time"] - switch["time"]) if switch["time"] else "waits",
            _degrees(switch["from"], state["devices_per_engine"]),
            _degrees(switch["to"], state["devices_per_engine"]),
            switch["mode"],
            duration(switch["cutover_ms"]),
            "under way" if switch["open"] else duration(switch["drain_ms"]),
            duration(switch["worst_token_gap_ms"]),
            UNKNOWN if cost is None else "∞" if gain is None else f"{gain:.2f}",
            UNKNOWN if cost is None else f"{cost:.2f}",
            Text(f"failed: {problem}", style="red") if problem else Text(switch["reason"]),
        )
    return Group(
        f"\nlast of {state['switch_count']} switches (gain and cost in request-seconds)", table
    )


def _degrees(layout: Sequence[Sequence[int]], devices: int) -> Text:
    parts = [(str(len(group) * devices), _colour(len(group) * devices)) for group in layout]
    return Text("+").join([Text(text, style=colour) for text, colour in parts])


def _colour(degree: int) -> str:
    return COLOURS.get(degree, WIDEST_COLOUR)


def _ago(seconds: float) -> str:
    value, unit = (
        (seconds, "s")
        if seconds < 60
        else (seconds / 60, "min")
        if seconds < 3600
        else (seconds / 3600, "h")
    )
    return f"{value:.0f} {unit}"


def room(size_bytes: int) -> str:
    """Return a number of bytes with three digits, in the largest unit of which there is one."""
    power = min(4, max(0, (size_bytes.bit_length() - 1) // 10))
    return (
        f"{float(f'{size_bytes / 1024**power:.3g}'):g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
    )


def duration(ms: float | None) -> str:
    """Return a time with three digits and its unit; a dash if there is none."""
    if ms is None:
        return UNKNOWN
    value, unit = (ms, "ms") if ms < 999.5 else (ms / 1e3, "s")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"
