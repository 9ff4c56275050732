"""README's table: one model on one server, `auto` beside stock vLLM, in its best single layout and
with all devices as one group, and beside Shift Parallelism; and where `auto` loses.

The load is that of docs/lab/results/phases.md, the goodput that of docs/lab/results/goodput.md. No
figure is typed: the words are in templates/front_page.md and templates/front_page_loses.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks import live_report
from experiments import goodput, phases_whole
from experiments.common import MODELS, RESULTS, Kept, Numbers, kept, template
from experiments.comparisons import EMULATED_FIXED
from experiments.phases_load import BURST_SHARE, LOW_SHARE
from experiments.phases_whole import E2E, TTFT
from experiments.rows import markdown, number, paragraph, spread
from experiments.servers import GRAPHS, PRODUCT, STOCK

Live = Mapping[str, Any]
"""Kept rows of a live comparison."""
MODEL, SERVER = goodput.MODEL, GRAPHS
WIDEST = "stock-tp8"
"""The layout of stock vLLM that has all devices in one group."""
BEFORE = "before"
"""The phase of switches that were made before the load began."""
SHOWN = ("low", "burst")
"""Phases that have a column."""
HEADINGS = (
    "",
    "low, E2E (s)",
    "burst, E2E (s)",
    "whole load, E2E (s)",
    "`auto` / this, whole load",
    "goodput (requests/s)",
    "switches",
)
LIVE = RESULTS / "numbers" / "live_quiet_and_bursts.json"
TRACE = RESULTS / "numbers" / "live_trace.json"
EMULATED = RESULTS / "numbers" / "emulated.json"


def section() -> str:
    """Return what README has between its marks."""
    live, trace, emulated = map(live_report.read, (LIVE, TRACE, EMULATED))
    return text(kept("phases"), kept("goodput"), live, trace, emulated)


def text(found: Kept, rates: Kept, live: Live, trace: Live, emulated: Live) -> str:
    """Return the set-up, the table and where `auto` loses, of kept numbers: the load with phases,
    the goodput, and live comparisons with phases, with a trace, and on emulated devices.
    """
    setup = template(
        "front_page",
        model=MODEL,
        server=SERVER,
        low=f"{LOW_SHARE:g}",
        burst=f"{BURST_SHARE:g}",
        seeds=len(found.seeds),
        enough=f"{100 * goodput.ENOUGH:.0f} %",
        ttft=f"{goodput.SLO.ttft:g}",
        tpot=f"{goodput.SLO.tpot:g}",
        at=found.at,
    )
    loses = template(
        "front_page_loses",
        switching=switching(found),
        shift=f"{_over(found, phases_whole.SHIFT):.2f}",
        product=", ".join(behind(found)) or "nothing",
        live=_listed(live_ratios(live)),
        trace=_listed(live_ratios(trace)),
        emulated=_listed(live_ratios(emulated, EMULATED_FIXED)),
        emulated_ttft=f"{max(live_ratios(emulated, EMULATED_FIXED, TTFT)):.2f}",
    )
    return "\n".join([*paragraph(setup), *table(found, rates), *paragraph(loses)])


def table(found: Kept, rates: Kept) -> list[str]:
    """Return the table: a row for each system, in means over the seeds."""
    rows = []
    for label, (server, name) in systems(found).items():
        made = spread([float(during(run)) for run in _auto(found)]) if name == "auto" else ""
        seconds = [number(one_s) for one_s in means_s(found, server, name)]
        over = "" if name == "auto" else number(_over(found, name))
        rows.append([label, *seconds, over, f"{goodput.most_rps(rates, name):g}", made])
    return markdown(HEADINGS, rows)


def means_s(found: Kept, server: str, name: str) -> list[float]:
    """Return a system's mean E2E in each phase of SHOWN and over the whole load, in means over the
    seeds.
    """
    runs = [one[MODEL][server][name] for one in found.seeds]
    in_phases = [[run["phases"][phase][E2E] for run in runs] for phase in SHOWN]
    whole = [phases_whole.whole(run, E2E) for run in runs]
    return [mean(ms) / 1e3 for ms in (*in_phases, whole)]


def systems(found: Kept) -> dict[str, tuple[str, str]]:
    """Return the server and the name of each system, by what the table calls it."""
    best = phases_whole.beside(found, MODEL, SERVER, STOCK).name
    return {
        f"best single layout of stock vLLM (`{best}`)": (STOCK, best),
        f"stock vLLM at TP 8 (`{WIDEST}`)": (STOCK, WIDEST),
        "Shift Parallelism, as it is modelled": (STOCK, phases_whole.SHIFT),
        "Flying Serving, `auto`": (SERVER, "auto"),
    }


def during(run: Numbers) -> int:
    """Return how many switches a run made while its load ran, without those before it."""
    return sum(switch["phase"] != BEFORE for switch in run["switches"])


def switching(found: Kept) -> str:
    """Return whether `auto` changed its layout on the load, and what that says of its lead."""
    layouts = {name for run in _auto(found) for share in run["layouts"].values() for name in share}
    if len(layouts) > 1:
        return f"changed its layout among {', '.join(sorted(layouts))}"
    return (
        f"kept one layout ({layouts.pop()}), so its lead is not one of switching: it is that of "
        "token parallel steps ([parts](docs/lab/results/parts.md)), which have not run on a GPU"
    )


def behind(found: Kept) -> list[str]:
    """Return where `auto` as the product runs is behind the best single layout of stock vLLM over
    the whole load, with the ratio.
    """
    best = {model: phases_whole.beside(found, model, PRODUCT, STOCK) for model in MODELS}
    return [
        f"{number(one.mean)} for {model} (`{one.name}`)"
        for model, one in best.items()
        if one.mean > 1
    ]


def live_ratios(
    live: Live, fixed: Sequence[str] = live_report.FIXED, figure: str = E2E
) -> list[float]:
    """Return `auto` over the best of some fixed layouts in a figure of all requests, for each
    round.
    """
    found = live_report.values(live)
    return live_report.ratios(found, "auto", live_report.WHOLE, figure, fixed)


def _listed(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def _over(found: Kept, name: str) -> float:
    """Return `auto` over a system of stock vLLM, in mean E2E of the whole load."""
    return phases_whole.over(found, MODEL, SERVER, STOCK, name).mean


def _auto(found: Kept) -> list[Numbers]:
    return [one[MODEL][SERVER]["auto"] for one in found.seeds]
