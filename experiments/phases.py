"""How far `auto` is from the best fixed layout in each phase of a load, beside how far each fixed
layout is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from experiments import phases_load, phases_whole, run_history
from experiments.common import MODELS, Kept, Numbers, Setting, template
from experiments.phases_load import BURSTS, PHASES, spans
from experiments.phases_runs import FIGURES, measure_system, systems
from experiments.rows import Row, markdown, number, paragraph, spread
from experiments.server_pages import ServerPage, layouts
from experiments.servers import GRAPHS, MAX_TOKENS, PRODUCT, SERVERS, STOCK, is_fixed

MOST_RATIO = 1.05
"""Bar of `auto` in its worst phase and figure."""
COMPARED = tuple(figure for figure in FIGURES if "queue" not in figure)
"""The figures whose ratios count: a queue of nearly 0 has no useful ratio."""
HEADINGS = {
    "ttft": "TTFT (s)",
    "tpot": "TPOT (ms)",
    "e2el": "E2E (s)",
    "queue_time": "queue (s)",
}
PAGE = ServerPage(
    "phases", "Distance to the best fixed layout, by phase of the load", servers=SERVERS
)


class Worst(NamedTuple):
    """The largest ratio of a system to the best fixed layout, over phases and figures.

    Args:
        ratios: one for each seed.
        phase, figure: where that is.
    """

    ratios: list[float]
    phase: str
    figure: str

    @property
    def mean(self) -> float:
        """Of the seeds."""
        return mean(self.ratios)

    @property
    def where(self) -> str:
        """The phase and the figure, in words."""
        return f"{self.phase}, {_figure(self.figure)}"


def measure(setting: Setting) -> Numbers:
    """By model, server and system: figures of each phase, switches, layouts."""
    return {
        model: {
            server: {
                one.name: measure_system(
                    one, model, phases_load.load(model, setting.seed), list(spans(BURSTS[model]))
                )
                for one in systems(server, model, setting)
            }
            for server in SERVERS
        }
        for model in MODELS
    }


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the page; it compares nothing with the paper."""
    causes = ["## Why", "", *paragraph(template("phases_causes"))]
    runs = run_history.section("phases", found, run_cells(found))
    first = [*_setting(found), *phases_whole.section(found), *runs]
    head = [*first, *_summary(found), *causes, *_switching(found)]
    return PAGE.write(found, folder, head, _table)


# ---- ratios


def names(found: Kept, model: str, server: str) -> list[str]:
    """Return the systems of a server, the fixed layouts last."""
    return list(found.seeds[0][model][server])


def ratios(
    found: Kept, model: str, server: str, system: str, cell: tuple[str, str], beside: str = ""
) -> list[float]:
    """Return a system's figure over the best fixed layout's of its server, or of the server
    `beside`, for each seed.

    Args:
        cell: the phase and the figure.
    """
    phase, figure = cell
    return [
        one[model][server][system]["phases"][phase][figure]
        / min(
            numbers["phases"][phase][figure]
            for name, numbers in one[model][beside or server].items()
            if is_fixed(name)
        )
        for one in found.seeds
    ]


def worst(
    found: Kept,
    model: str,
    server: str,
    system: str,
    phases: Sequence[str] = PHASES,
    beside: str = "",
) -> Worst:
    """Return the largest ratio of a system, in the mean over seeds."""
    cells = [(phase, figure) for phase in phases for figure in COMPARED]
    tried = [Worst(ratios(found, model, server, system, cell, beside), *cell) for cell in cells]
    return max(tried, key=lambda one: one.mean)


def run_cells(found: Kept) -> dict[str, str]:
    """Return what the list of all runs shows of one."""
    places = [(model, server) for model in MODELS for server in phases_whole.OURS]
    cells = {}
    for model, server in places:
        stock = phases_whole.beside(found, model, server, STOCK).mean
        far = worst(found, model, server, "auto").mean
        cells[f"{model}, {server}: whole load, E2E / best single stock layout"] = number(stock)
        cells[f"{model}, {server}: worst phase and figure / own best layout"] = number(far)
    return cells


def headline(found: Kept) -> str:
    """Return `auto` in its worst phase and figure, in two sentences."""
    ours = [(model, server) for model in MODELS for server in (PRODUCT, GRAPHS)]
    auto = [worst(found, *place, "auto").mean for place in ours]
    stock = [worst(found, *place, "auto", beside=STOCK).mean for place in ours]
    of_stock = sum(ratio <= MOST_RATIO for ratio in stock)
    within = sum(ratio <= MOST_RATIO for ratio in auto)
    return (
        f"Beside the stock layout that is best in a phase and figure, `auto` is within "
        f"{MOST_RATIO} everywhere on {of_stock} of {len(stock)} servers; its worst is "
        f"{number(max(stock))}. Beside the fixed layouts of our own server it is on {within} of "
        f"{len(auto)}; its worst is {number(max(auto))}."
    )


# ---- the page


def _setting(found: Kept) -> list[str]:
    rates = "; ".join(
        f"{model} {low_rps:.3g} and {burst_rps:.3g} requests/s "
        f"(capacity {phases_load.CAPACITY_RPS[model]:.3g}), {BURSTS[model]} bursts"
        for model in MODELS
        for low_rps, burst_rps in [phases_load.rates_rps(model)]
    )
    given = {
        "low_s": f"{phases_load.LOW_S:g}",
        "burst_s": f"{phases_load.BURST_S:g}",
        "after_s": f"{phases_load.AFTER_S:g}",
        "max_tokens": f"{MAX_TOKENS:,}",
    }
    return paragraph(template("phases", rates=rates, seeds=len(found.seeds), **given))


def _summary(found: Kept) -> list[str]:
    """Return the worst ratio of each system of each server, and where that is."""
    headings = ["server", "system", "worst ratio", "where", "beside the best `stock-*`"]
    lines = []
    for model in MODELS:
        rows = []
        for server in SERVERS:
            for name in names(found, model, server):
                far = worst(found, model, server, name)
                stock = worst(found, model, server, name, beside=STOCK)
                rows.append([server, name, spread(far.ratios), far.where, spread(stock.ratios)])
        lines += [f"## Worst ratios, {model}", "", *markdown(headings, rows)]
    return lines


def _switching(found: Kept) -> list[str]:
    """Return when `auto` and the fork switch, and in which layouts they spend each phase."""
    rows = []
    for model in MODELS:
        for server, name in _switchers(found, model):
            runs = [one[model][server][name] for one in found.seeds]
            counts = spread([float(len(one["switches"])) for one in runs])
            delays = [_delays(runs, phase, model) for phase in ("burst", "after")]
            shares = {phase: layouts([one["layouts"][phase] for one in runs]) for phase in PHASES}
            in_layouts = "; ".join(f"{phase}: {share}" for phase, share in shares.items())
            waits = _waits(runs)
            rows.append([model, f"{name}, {server}", counts, waits, *delays, in_layouts])
    headings = [
        "model",
        "system",
        "switches",
        "of them sequential: waits (s)",
        "first after a burst's begin (s)",
        "first after its end (s)",
        "share of time in layouts",
    ]
    return ["## Switches", "", *paragraph(template("phases_switches")), *markdown(headings, rows)]


def _switchers(found: Kept, model: str) -> Iterator[tuple[str, str]]:
    """Yield (server, system) of all that switch."""
    for server in SERVERS:
        for name in names(found, model, server):
            if name in ("auto", "fork"):
                yield server, name


def _waits(runs: Sequence[Numbers]) -> str:
    """Return how long new requests waited for old ones in the switches that wait for these, and
    how many such switches there were.
    """
    waits = [row["waited_s"] for one in runs for row in one["switches"] if row["waited_s"] > 0]
    return f"{spread(waits)}, {len(waits)} times" if waits else "none"


def _delays(runs: Sequence[Numbers], phase: str, model: str) -> str:
    """Return the seconds from each begin of a phase to the first switch after it, and of how many
    begins a switch follows at all.
    """
    begins = [
        (span.start_s, span.end_s if phase == "burst" else span.start_s + phases_load.LOW_S)
        for span in spans(BURSTS[model])
        if span.phase == phase
    ]
    delays = [
        min(after)
        for one in runs
        for start_s, end_s in begins
        if (
            after := [
                row["at_s"] - start_s for row in one["switches"] if start_s <= row["at_s"] < end_s
            ]
        )
    ]
    count = len(runs) * len(begins)
    return f"{spread(delays)}, {len(delays)} of {count}" if delays else f"never, 0 of {count}"


def _table(found: Kept, model: str, server: str) -> list[str]:
    """Return the figures by phase, the phase last in which the first system is farthest from the
    best fixed layout.
    """
    systems_of = names(found, model, server)
    subject = systems_of[0]
    ordered = sorted(PHASES, key=lambda one: worst(found, model, server, subject, [one]).mean)
    rows = [_row(found, model, server, name, phase) for phase in ordered for name in systems_of]
    columns = [
        f"{statistic} {heading}" for heading in HEADINGS.values() for statistic in ("mean", "P90")
    ]
    return markdown(["phase", "system", "in flight", *columns, "worst ratio"], rows)


def _row(found: Kept, model: str, server: str, name: str, phase: str) -> list[str]:
    there = [one[model][server][name]["phases"][phase] for one in found.seeds]
    cells = []
    for figure in FIGURES:
        value = mean(one[figure] for one in there) / (1.0 if "tpot" in figure else 1e3)
        text = number(value)
        if figure in COMPARED:
            text += f" ({mean(ratios(found, model, server, name, (phase, figure))):.2f})"
        cells.append(text)
    far = worst(found, model, server, name, [phase])
    in_flight = number(mean(one["in_flight"] for one in there))
    return [phase, name, in_flight, *cells, f"{spread(far.ratios)}, {_figure(far.figure)}"]


def _figure(figure: str) -> str:
    """Return a figure's name as tables have it: "P90 TTFT"."""
    statistic, _, rest = figure.partition("_")
    heading = HEADINGS[rest.removesuffix("_ms")].partition(" (")[0]
    return f"{'P90' if statistic == 'p90' else statistic} {heading}"
