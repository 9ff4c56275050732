"""`auto` on loads that its constants were not chosen on: switches per minute, and latencies beside
the best fixed layout's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any, NamedTuple

from experiments import run_history
from experiments.common import MODELS, Kept, Numbers, template
from experiments.constants import CONSTANTS
from experiments.held_out_load import BATCH, LOADS, SECONDS, Load
from experiments.held_out_runs import MEANS, OTHERS, SERVERS, SETTLE_S, measure
from experiments.rows import Row, markdown, number, paragraph, spread
from experiments.server_pages import ServerPage, layouts
from experiments.servers import is_fixed

__all__ = ["measure", "pages"]

MOST_RATIO = 1.03
"""Of mean E2E to the best fixed layout's."""
MOST_SWITCHES = 1.0
"""In a minute of a load whose rate does not change."""
ON_ABLATION = "not noted; half and twice tried on the loads of `experiments/ablation.py`"
CHOSEN: Mapping[str, str] = {
    "FORECAST_ERROR": "three seeds of `experiments/ablation.py`: 0.05 before",
    "CHANGE_S": "by hand; `experiments/ablation.py`, then the alternating load of "
    "[phases.md](phases.md), on which a second constant for bursts went",
    "LENGTHS_CV": "that of uniform lengths: the paper's generator",
    "FIRST_TOKEN_WEIGHT": "by hand, after a bound of 10 % had preferred TP8 on the alternating "
    "load of [phases.md](phases.md), seed 1",
    "SETTLE_S": "by hand: the time in which a burst is to be noticed",
    "BEYOND": "by hand, with unit tests",
    "INTERVALS_PER_DOUBLING": "by hand, with unit tests",
    "RECENT_S": "by hand, with the alternating load of [phases.md](phases.md)",
    "TOGETHER_S": "by hand, with unit tests of `n` = 8",
    "MEMORY_EVENTS": "by hand: as MEMORY_REQUESTS",
}
"""On which loads a constant was chosen; the others: ON_ABLATION."""
PAGE = ServerPage(
    "held_out", "Loads that the policy's constants were not chosen on", servers=SERVERS
)


class Place(NamedTuple):
    """One line of the page: a load of a model on a server."""

    model: str
    server: str
    load: Load


# ---- what they show


def places() -> Iterator[Place]:
    """Yield every line of the page."""
    for model in MODELS:
        for server in SERVERS:
            for load in LOADS:
                yield Place(model, server, load)


def runs(found: Kept, place: Place, system: str) -> list[Numbers]:
    """Return the figures of a system, for each seed."""
    return [one[place.model][place.server][place.load.name][system] for one in found.seeds]


def fixed(found: Kept, place: Place) -> list[str]:
    """Return the fixed layouts of a server."""
    return [
        name
        for name in found.seeds[0][place.model][place.server][place.load.name]
        if is_fixed(name)
    ]


def ratios(found: Kept, place: Place, system: str, figure: str = "e2el") -> list[float]:
    """Return a system's mean over the least of the fixed layouts', for each seed."""
    key = f"mean_{figure}_ms"
    best = zip(*(runs(found, place, name) for name in fixed(found, place)), strict=True)
    return [
        one[key] / min(other[key] for other in others)
        for one, others in zip(runs(found, place, system), best, strict=True)
    ]


def is_slow(found: Kept, place: Place) -> bool:
    """Whether `auto` misses the aim of mean E2E."""
    return mean(ratios(found, place, "auto")) > MOST_RATIO


def is_restless(found: Kept, place: Place) -> bool:
    """Whether `auto` switches more often than it may although the rate does not change."""
    most = max(one["per_minute"] for one in runs(found, place, "auto"))
    return place.load.is_constant and most > MOST_SWITCHES


def run_cells(found: Kept) -> dict[str, str]:
    """Return what the list of all runs shows of one, by family."""
    cells = {}
    for family in dict.fromkeys(load.family for load in LOADS):
        there = [place for place in places() if place.load.family == family]
        means = [mean(ratios(found, place, "auto")) for place in there]
        within = sum(ratio <= MOST_RATIO for ratio in means)
        cells[family] = (
            f"{within} of {len(means)}, mean {mean(means):.3f}, worst {number(max(means))}"
        )
    return cells


def regret(found: Kept, model: str, server: str, system: str) -> tuple[float, float]:
    """Return how far a system is from the fixed layout that is best for each load: the geometric
    mean over all loads, and the worst.
    """
    there = [Place(model, server, load) for load in LOADS]
    means = [mean(ratios(found, place, system)) for place in there]
    return geometric_mean(means), max(means)


def kept_for_all(found: Kept, model: str, server: str) -> str:
    """Return the fixed layout that is the best to keep for all loads."""
    every = fixed(found, Place(model, server, LOADS[0]))
    return min(every, key=lambda name: regret(found, model, server, name))


def headline(found: Kept) -> str:
    """Return README's sentence: `auto` beside one layout that is kept for every load."""
    there = [(model, server) for model in MODELS for server in SERVERS]
    auto = [regret(found, *place, "auto") for place in there]
    best = [regret(found, *place, kept_for_all(found, *place)) for place in there]
    shown = [
        f"{number(min(means))} to {number(max(means))} (worst load {number(max(worst))})"
        for means, worst in (zip(*both, strict=True) for both in (auto, best))
    ]
    return (
        f"Over {len(LOADS)} loads the mean E2E of `auto` is {shown[0]} of the own fixed layout "
        "that is best for each of them, in geometric means by model and server. The one layout "
        f"that is best to keep for all loads has {shown[1]}. Which one that is has to be known; "
        "stock vLLM was not run on these loads."
    )


# ---- the page


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the page; it compares nothing with the paper."""
    head = [
        *_setting(found),
        *run_history.section("held_out", found, run_cells(found)),
        *_regret(found),
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


def _regret(found: Kept) -> list[str]:
    """Return what it costs to keep one layout for every load, beside `auto`."""
    rows = []
    for model in MODELS:
        for server in SERVERS:
            best = kept_for_all(found, model, server)
            rest = [name for name in fixed(found, Place(model, server, LOADS[0])) if name != best]
            rows.append(
                [
                    model,
                    server,
                    _both(regret(found, model, server, "auto")),
                    _both(regret(found, model, server, best), best),
                    "; ".join(_both(regret(found, model, server, name), name) for name in rest),
                ]
            )
    headings = ["model", "server", "auto", "best layout kept for all loads", "other layouts"]
    text = paragraph(template("held_out_regret", loads=len(LOADS)))
    return ["## If the load is not known", "", *text, *markdown(headings, rows)]


def _both(value: tuple[float, float], name: str = "") -> str:
    return f"{number(value[0])}, {number(value[1])}{f' ({name})' if name else ''}"


def _summary(found: Kept) -> list[str]:
    """Return how many loads meet the aims, and the worst of each family."""
    rows = []
    for family in dict.fromkeys(load.family for load in LOADS):
        there = [place for place in places() if place.load.family == family]
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
            _best(found, place),
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
        "mean E2E / best",
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


def _best(found: Kept, place: Place) -> str:
    """Return the fixed layout with the least mean E2E."""
    names = fixed(found, place)
    return min(names, key=lambda name: mean(ratios(found, place, name)))


def _table(found: Kept, model: str, server: str) -> list[str]:
    rows = [_row(found, place) for place in places() if place[:2] == (model, server)]
    headings = [
        "load",
        "requests",
        "mean TTFT (s)",
        "mean TPOT (ms)",
        "mean E2E (s)",
        "E2E of fixed layouts / best",
        "switches a minute",
        "switches",
        "share of time in layouts",
    ]
    return markdown(headings, rows)


def _row(found: Kept, place: Place) -> list[str]:
    there = runs(found, place, "auto")
    cells = []
    for figure, scale in zip(MEANS, (1e3, 1.0, 1e3), strict=True):
        value = mean(one[f"mean_{figure}_ms"] for one in there) / scale
        cells.append(f"{number(value)} ({spread(ratios(found, place, 'auto', figure))})")
    others = ", ".join(
        f"{name} {number(mean(ratios(found, place, name)))}" for name in fixed(found, place)
    )
    return [
        place.load.name,
        number(mean(one["requests"] for one in there)),
        cells[0],
        cells[1],
        _marked(cells[2], is_slow(found, place)),
        others,
        _marked(_per_minute(found, place), is_restless(found, place)),
        spread([float(len(one["switches"])) for one in there]),
        layouts([one["layouts"] for one in there]),
    ]
