"""Figures of several servers with the same load, by phase: a table and plain sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table

from flying_lab.bench.switchlog import LoggedSwitch
from flying_lab.results.metrics import Summary
from flying_lab.results.results import Results
from flying_serving.cli.render import degrees_text

FIXED = ("static-dp", "static-tp")
AUTO = "auto"
WORDS = {"static-dp": "engines apart", "static-tp": "engines together", AUTO: AUTO}
FIGURES = tuple(
    f"{statistic}_{latency}_ms"
    for latency in ("ttft", "tpot", "e2el")
    for statistic in ("mean", "p90")
)
HEADINGS = ("TTFT", "P90", "TPOT", "P90", "E2E", "P90")
_MEAN = "mean_e2el_ms"


@dataclass(frozen=True)
class PhaseFigures:
    """The figures of one phase, in ms, by server. Every request has completed."""

    name: str
    requests: int
    by_server: Mapping[str, Mapping[str, float]]

    def mean_ms(self, server: str) -> float:
        """Return the mean time from sending a request to its last token."""
        return self.by_server[server][_MEAN]

    @property
    def best(self) -> str:
        """The fixed layout with the lower mean."""
        return min(FIXED, key=self.mean_ms)

    @property
    def other(self) -> str:
        """The fixed layout with the higher mean."""
        return next(name for name in FIXED if name != self.best)

    def ratio(self, server: str) -> float:
        """Return the mean of a server over that of the better fixed layout."""
        return self.mean_ms(server) / self.mean_ms(self.best)


def phases_of(summaries: Mapping[str, Summary]) -> list[PhaseFigures]:
    """Return the phases in their order."""
    first = next(iter(summaries.values()))
    return [
        PhaseFigures(
            phase,
            part["num_prompts"],
            {
                server: {figure: summary["phases"][phase][figure] for figure in FIGURES}
                for server, summary in summaries.items()
            },
        )
        for phase, part in first["phases"].items()
    ]


def table(phases: Sequence[PhaseFigures]) -> Table:
    """Return a table with one row for each phase and server: means and P90, in ms."""
    title = "\nmean and P90 on emulated devices, in ms"
    made = Table(
        title=title, title_justify="left", title_style="", box=SIMPLE, padding=(0, 1, 0, 0)
    )
    made.add_column("phase", no_wrap=True)
    made.add_column("server", no_wrap=True)
    for heading in HEADINGS:
        made.add_column(heading, justify="right", no_wrap=True)
    for phase in phases:
        for number, (server, figures) in enumerate(phase.by_server.items()):
            name = phase.name if number == 0 else ""
            values = (f"{figures[figure]:.0f}" for figure in FIGURES)
            is_last = number == len(phase.by_server) - 1
            made.add_row(name, WORDS[server], *values, end_section=is_last)
    return made


def decisions(results: Results, switches: Sequence[LoggedSwitch]) -> Iterator[str]:
    """Yield when `auto` changed the layout and why, a line for each switch."""
    yield "\nthe switches of auto; a layout is the engines of each group:"
    if not switches:
        yield "  none"
    for switch in switches:
        at_s = switch.time_s - results.run.started_wall_s
        degrees = " to ".join(degrees_text(end) for end in (switch.old, switch.new))
        yield (
            f"  {at_s:.1f} s, {phase_at(results, at_s)}: {degrees} by {switch.mode}, "
            f"{switch.requests_in_flight} in flight"
        )
        yield f"    because of {switch.reason}"


def phase_at(results: Results, time_s: float) -> str:
    """Return the phase of the last request that was due by then. Before all of them a request
    tests the server.
    """
    named = zip(results.floats("arrival_s"), results.texts("phase"), strict=True)
    due = [phase for arrival_s, phase in named if arrival_s <= time_s]
    return str(due[-1]) if due else "test request"


def conclusion(phases: Sequence[PhaseFigures], switches: Sequence[LoggedSwitch]) -> str:
    """Return the findings for a newcomer, in plain words."""
    joined = sum(_widest(switch.new) > _widest(switch.old) for switch in switches)
    parted = sum(_widest(switch.new) < _widest(switch.old) for switch in switches)
    faster = (
        f"{WORDS[name]} answered faster in {quoted(won)}"
        for name in FIXED
        if (won := [phase.name for phase in phases if phase.best == name])
    )
    ratios = ", ".join(
        f"{phase.ratio(AUTO):.2f} in {phase.name!r} ({WORDS[phase.other]}: "
        f"{phase.ratio(phase.other):.2f})"
        for phase in phases
    )
    return (
        f"\nIn plain words: on these emulated devices {', '.join(faster)}. With auto the server "
        f"joined its engines {times(joined)} and parted them {times(parted)} by itself while "
        "requests streamed, and every request got all its tokens. Its mean time to the last token, "
        f"over that of the better fixed layout: {ratios}."
    )


def quoted(names: Sequence[str]) -> str:
    """Return quoted names as a phrase of a sentence."""
    *first, last = (f"'{name}'" for name in names)
    return " and ".join(filter(None, [", ".join(first), last]))


def times(count: int) -> str:
    """Return a count in words: never, once, twice, 3 times."""
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _widest(groups: Sequence[Sequence[int]]) -> int:
    return max(map(len, groups))
