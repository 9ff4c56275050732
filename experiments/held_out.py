"""`auto` on loads that its constants were not chosen on: switches per minute, and latencies beside
the best fixed layout's, of stock vLLM and of our own server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from experiments import held_out_regret, run_history
from experiments.common import MODELS, Kept, template
from experiments.constants import CONSTANTS
from experiments.held_out_load import BATCH, SECONDS
from experiments.held_out_ratios import (
    MOST_RATIO,
    MOST_SWITCHES,
    Place,
    best,
    families,
    fixed,
    is_restless,
    is_slow,
    places,
    ratios,
    run_cells,
    runs,
)
from experiments.held_out_runs import MEANS, OTHERS, SETTLE_S, SHIFT, measure
from experiments.rows import Row, markdown, number, paragraph, spread
from experiments.server_pages import ServerPage, layouts
from experiments.servers import SERVERS, STOCK

__all__ = ["measure", "pages"]

ON_ABLATION = "not noted; half and twice tried on the loads of `experiments/ablation.py`"
CHOSEN: Mapping[str, str] = {
    "FORECAST_ERROR": "the error of forecasts beside each other for the same arrivals; 0.1 before",
    "CHANGE_S": "by hand; `experiments/ablation.py`, then the alternating load of "
    "[phases.md](phases.md), on which a second constant for bursts went",
    "LENGTHS_CV": "that of uniform lengths: the paper's generator",
    "FIRST_TOKEN_WEIGHT": "by hand, after a bound of 10 % had preferred TP8 on the alternating "
    "load of [phases.md](phases.md), seed 1",
    "SETTLE_S": "by hand: the time in which a burst is to be noticed",
    "BEYOND": "by hand, with unit tests",
    "INTERVALS_PER_DOUBLING": "by hand, with unit tests",
    "HOLDS_S": "by hand, with a unit test",
    "RECENT_S": "by hand, with the alternating load of [phases.md](phases.md)",
    "TOGETHER_S": "by hand, with unit tests of `n` = 8",
    "MEMORY_EVENTS": "by hand: as MEMORY_REQUESTS",
}
"""On which loads a constant was chosen; the others: ON_ABLATION."""
PAGE = ServerPage(
    "held_out", "Loads that the policy's constants were not chosen on", servers=SERVERS
)


# ---- the page


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the page; it compares nothing with the paper."""
    head = [
        *_setting(found),
        *held_out_regret.section(found),
        *run_history.section("held_out", found, run_cells(found)),
        *_summary(found),
        *_misses(found),
        *["## Why", "", *paragraph(template("held_out_causes"))],
        *_constants(found),
    ]
    return PAGE.write(found, folder, head, _table)


def _setting(found: Kept) -> list[str]:
    given: dict[str, Any] = {
        "batch": BATCH,
        "seconds": ", ".join(f"{SECONDS[model]:g} s on {model}" for model in MODELS),
        "seeds": len(found.seeds),
        "most_ratio": MOST_RATIO,
        "most_switches": f"{MOST_SWITCHES:g}",
        "settle_s": f"{SETTLE_S:g}",
    }
    return paragraph(template("held_out", **given))


def _constants(found: Kept) -> list[str]:
    values = found.seeds[0]["constants"]
    rows = [
        [
            f"`{one.name}` (`{one.module.replace('.', '/')}.py`)",
            _value(values[one.name]),
            one.unit,
            one.purpose,
            CHOSEN.get(one.name, ON_ABLATION),
        ]
        for one in (*CONSTANTS, *OTHERS)
        if one.name in values
    ]
    headings = ["constant", "value", "unit", "purpose", "chosen on"]
    text = paragraph(template("held_out_constants"))
    return ["## Constants", "", *text, *markdown(headings, rows)]


def _value(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _summary(found: Kept) -> list[str]:
    """Return how many loads meet the aims, and the worst of each family."""
    rows = []
    for family, there in families():
        slow = sum(is_slow(found, place) for place in there)
        worst = max(there, key=lambda place: mean(ratios(found, place, "auto")))
        rates = [one["per_minute"] for place in there for one in runs(found, place, "auto")]
        restless = sum(is_restless(found, place) for place in there)
        rows.append(
            [
                family,
                "yes" if there[0].load.is_held_out else "no",
                f"{len(there) - slow} of {len(there)}",
                f"{spread(ratios(found, worst, 'auto'))}: {worst.load.share:g}, "
                f"{worst.model}, {worst.server}",
                spread(rates),
                f"{len(there) - restless} of {len(there)}"
                if there[0].load.is_constant
                else "the rate changes",
            ]
        )
    headings = [
        "family",
        "held out",
        f"mean E2E at most {MOST_RATIO}",
        "worst mean E2E",
        "switches a minute",
        f"at most {MOST_SWITCHES:g} a minute",
    ]
    return ["## By family", "", *markdown(headings, rows)]


def _misses(found: Kept) -> list[str]:
    rows = [
        [
            place.model,
            place.server,
            place.load.name,
            _marked(spread(ratios(found, place, "auto")), is_slow(found, place)),
            best(found, place),
            _marked(_per_minute(found, place), is_restless(found, place)),
            layouts([one["layouts"] for one in runs(found, place, "auto")]),
        ]
        for place in places()
        if is_slow(found, place) or is_restless(found, place)
    ]
    headings = [
        "model",
        "server",
        "load",
        "mean E2E / best own layout",
        "best",
        "switches a minute",
        "share of time in layouts",
    ]
    none = ["None.", ""]
    return ["## Misses", "", *(markdown(headings, rows) if rows else none)]


def _marked(text: str, misses: bool) -> str:
    return f"**{text}**" if misses else text


def _per_minute(found: Kept, place: Place) -> str:
    return spread([one["per_minute"] for one in runs(found, place, "auto")])


def _table(found: Kept, model: str, server: str) -> list[str]:
    there = [place for place in places([server]) if place.model == model]
    if server == STOCK:
        return markdown(_STOCK_HEADINGS, [_stock_row(found, place) for place in there])
    return markdown(_HEADINGS, [_row(found, place) for place in there])


_HEADINGS = (
    "load",
    "requests",
    "mean TTFT (s)",
    "mean TPOT (ms)",
    "mean E2E (s)",
    "E2E / best stock layout",
    "E2E of own fixed layouts / best",
    "switches a minute",
    "switches",
    "share of time in layouts",
)
_STOCK_HEADINGS = ("load", "mean E2E of the best layout (s)", "E2E of systems / best layout")


def _row(found: Kept, place: Place) -> list[str]:
    there = runs(found, place, "auto")
    cells = []
    for figure, scale in zip(MEANS, (1e3, 1.0, 1e3), strict=True):
        value = mean(one[f"mean_{figure}_ms"] for one in there) / scale
        cells.append(f"{number(value)} ({spread(ratios(found, place, 'auto', figure))})")
    stock = spread(ratios(found, place, "auto", beside=STOCK))
    return [
        place.load.name,
        number(mean(one["requests"] for one in there)),
        cells[0],
        cells[1],
        _marked(cells[2], is_slow(found, place)),
        f"{stock} ({best(found, place._replace(server=STOCK))})",
        _beside_best(found, place, fixed(found, place)),
        _marked(_per_minute(found, place), is_restless(found, place)),
        spread([float(len(one["switches"])) for one in there]),
        layouts([one["layouts"] for one in there]),
    ]


def _stock_row(found: Kept, place: Place) -> list[str]:
    least = best(found, place)
    mean_s = mean(one["mean_e2el_ms"] for one in runs(found, place, least)) / 1e3
    systems = [*fixed(found, place), SHIFT]
    return [place.load.name, f"{number(mean_s)} ({least})", _beside_best(found, place, systems)]


def _beside_best(found: Kept, place: Place, systems: Sequence[str]) -> str:
    """Return mean E2E of systems over that of the best fixed layout of their server."""
    return ", ".join(f"{name} {number(mean(ratios(found, place, name)))}" for name in systems)
