"""README's table: each model on one server, `auto` beside stock vLLM, in its best single layout and
with all devices as one group, beside Shift Parallelism, and beside the best fixed layout of its own
server; and where `auto` loses.

The load is that of docs/lab/results/phases.md, the goodput that of docs/lab/results/goodput.md. No
figure is typed: the words are in templates/front_page.md and templates/front_page_loses.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

from benchmarks import live_report
from experiments import goodput, phases_whole
from experiments.common import MODELS, RESULTS, Kept, Numbers, kept, template
from experiments.comparisons import EMULATED_FIXED
from experiments.phases_load import BURST_SHARE, LOW_SHARE
from experiments.phases_whole import E2E, TTFT
from experiments.rows import markdown, number, paragraph, spread
from experiments.servers import GRAPHS, PRODUCT, STOCK, is_fixed

Live = Mapping[str, Any]
"""Kept rows of a live comparison."""
SERVER = GRAPHS
WIDEST = "stock-tp8"
"""The layout of stock vLLM that has all devices in one group."""
BEFORE = "before"
"""The phase of switches that were made before the load began."""
HEADINGS = (
    "",
    "stock vLLM, best single layout (s)",
    "stock vLLM, TP 8 (s)",
    "Shift Parallelism (s)",
    "`auto` (s)",
    "`auto` / best of stock",
    "`auto` / Shift Parallelism",
    "`auto` / best of its own fixed layouts",
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
        server=SERVER,
        low=f"{LOW_SHARE:g}",
        burst=f"{BURST_SHARE:g}",
        seeds=len(found.seeds),
        at=found.at,
    )
    within = template(
        "front_page_goodput",
        model=goodput.MODEL,
        enough=f"{100 * goodput.ENOUGH:.0f} %",
        ttft=f"{goodput.SLO.ttft:g}",
        tpot=f"{goodput.SLO.tpot:g}",
        rates=within_slo(rates),
    )
    loses = template(
        "front_page_loses",
        unswitched=unswitched(found),
        own=_listed([_own(found, model).mean for model in MODELS]),
        shift=_listed([_over(found, model, phases_whole.SHIFT) for model in MODELS]),
        product=", ".join(behind(found)) or "nothing",
        live=_listed(live_ratios(live)),
        trace=_listed(live_ratios(trace)),
        emulated=_listed(live_ratios(emulated, EMULATED_FIXED)),
        emulated_ttft=f"{max(live_ratios(emulated, EMULATED_FIXED, TTFT)):.2f}",
    )
    parts = [*paragraph(setup), *table(found), *paragraph(within), *paragraph(loses)]
    return "\n".join(parts)


def table(found: Kept) -> list[str]:
    """Return the table: a row for each model, in means over the seeds."""
    return markdown(HEADINGS, [row(found, model) for model in MODELS])


def row(found: Kept, model: str) -> list[str]:
    """Return a model's row."""
    best, own = phases_whole.beside(found, model, SERVER, STOCK), _own(found, model)
    seconds = [
        number(mean_s(found, model, server, name))
        for server, name in (
            (STOCK, best.name),
            (STOCK, WIDEST),
            (STOCK, phases_whole.SHIFT),
            (SERVER, "auto"),
        )
    ]
    return [
        model,
        f"{seconds[0]} (`{best.name}`)",
        *seconds[1:],
        number(best.mean),
        number(_over(found, model, phases_whole.SHIFT)),
        f"{number(own.mean)} (`{own.name}`)",
        spread([float(during(run)) for run in _auto(found, model)]),
    ]


def mean_s(found: Kept, model: str, server: str, name: str) -> float:
    """Return a system's mean E2E over the whole load, in the mean over the seeds."""
    return mean(phases_whole.whole(one[model][server][name], E2E) for one in found.seeds) / 1e3


def within_slo(rates: Kept) -> str:
    """Return the highest rate within the SLO of `auto`, of Shift Parallelism, of the best fixed
    layout of its own, and of stock vLLM's best.
    """
    fixed = [name for name in goodput.names(rates) if is_fixed(name)]
    best = [
        max((name for name in fixed if name.startswith(kind)), key=partial(goodput.most_rps, rates))
        for kind in ("static-", "stock-")
    ]
    return ", ".join(
        f"{goodput.most_rps(rates, name):g} (`{name}`)"
        for name in ("auto", phases_whole.SHIFT, *best)
    )


def during(run: Numbers) -> int:
    """Return how many switches a run made while its load ran, without those before it."""
    return sum(switch["phase"] != BEFORE for switch in run["switches"])


def unswitched(found: Kept) -> str:
    """Return the models on whose load `auto` kept one layout, in a sentence."""
    kept_one = [f"{model} ({one})" for model in MODELS for one in _only_layouts(found, model)]
    if not kept_one:
        return "`auto` changed its layout on each of these loads."
    return (
        f"For {', '.join(kept_one)} `auto` kept one layout: that lead is not one of "
        "switching, it is that of token parallel steps ([parts](docs/lab/results/parts.md))."
    )


def _only_layouts(found: Kept, model: str) -> list[str]:
    """Return the one layout of a model's runs, or nothing if there are several."""
    layouts = {
        name for run in _auto(found, model) for share in run["layouts"].values() for name in share
    }
    return sorted(layouts) if len(layouts) == 1 else []


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


def _over(found: Kept, model: str, name: str) -> float:
    """Return `auto` over a system of stock vLLM, in mean E2E of the whole load."""
    return phases_whole.over(found, model, SERVER, STOCK, name).mean


def _own(found: Kept, model: str) -> phases_whole.Best:
    """Return `auto` over the best fixed layout of its own server."""
    return phases_whole.beside(found, model, SERVER, SERVER)


def _auto(found: Kept, model: str) -> list[Numbers]:
    return [one[model][SERVER]["auto"] for one in found.seeds]
