"""What it costs to keep one layout for every load of docs/lab/results/held_out.md, beside `auto`:
over the stock layout that is best for each load, and over the own one.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean, mean
from typing import NamedTuple

from experiments.common import MODELS, Kept, template
from experiments.held_out_load import LOADS
from experiments.held_out_ratios import Place, fixed, ratios
from experiments.held_out_runs import OURS, SHIFT
from experiments.rows import markdown, number, paragraph
from experiments.servers import GRAPHS, PRODUCT, STOCK

AUTO = "auto"


class Regret(NamedTuple):
    """How far one system is from the fixed layout that is best for each load, in mean E2E.

    Args:
        mean: geometric, over the loads.
        worst: of a load.
    """

    mean: float
    worst: float

    def __str__(self) -> str:
        """Both, as tables have them."""
        return f"{number(self.mean)}, {number(self.worst)}"


def regret(found: Kept, model: str, server: str, system: str, beside: str = "") -> Regret:
    """Return that of a system, over the fixed layouts of its server or of the server `beside`."""
    there = [Place(model, server, load) for load in LOADS]
    means = [mean(ratios(found, place, system, beside=beside)) for place in there]
    return Regret(geometric_mean(means), max(means))


def kept_for_all(found: Kept, model: str, server: str) -> str:
    """Return the fixed layout of a server that is the best to keep for all loads."""
    return min(_fixed(found, model, server), key=lambda name: regret(found, model, server, name))


def headline(found: Kept) -> str:
    """Return in sentences `auto` beside one layout that is kept for every load."""
    graphs, product = (
        _range([regret(found, model, server, AUTO, STOCK) for model in MODELS])
        for server in (GRAPHS, PRODUCT)
    )
    kept = _range([_best(found, model, STOCK) for model in MODELS])
    shift = _range([regret(found, model, STOCK, SHIFT) for model in MODELS])
    ours = [(model, server) for model in MODELS for server in OURS]
    own = _range([regret(found, *place, AUTO) for place in ours])
    own_kept = _range([_best(found, *place) for place in ours])
    return (
        f"Over {len(LOADS)} loads the mean E2E of `auto` is {graphs} with graphs, and {product} as "
        "the product runs, of the stock layout that is best for each of them, in geometric means "
        f"by model. The one stock layout that is best to keep for all loads has {kept}; which one "
        f"that is has to be known. Shift Parallelism, as it is modelled, has {shift}. Beside the "
        f"own fixed layout that is best for each load, `auto` has {own}, and the best one to keep "
        f"{own_kept}."
    )


def section(found: Kept) -> list[str]:
    """Return the section of the page: beside stock first, then beside our own layouts."""
    return [
        "## If the load is not known",
        "",
        *paragraph(template("held_out_regret", loads=len(LOADS))),
        *_beside_stock(found),
        *paragraph(template("held_out_regret_own")),
        *_beside_own(found),
    ]


# ---- both tables


def _beside_stock(found: Kept) -> list[str]:
    rows = [
        [
            model,
            *(str(regret(found, model, server, AUTO, STOCK)) for server in (GRAPHS, PRODUCT)),
            *_kept_and_others(found, model, STOCK),
            str(regret(found, model, STOCK, SHIFT)),
        ]
        for model in MODELS
    ]
    headings = [
        "model",
        f"auto, {GRAPHS}",
        f"auto, {PRODUCT}",
        "best stock layout kept for all loads",
        "other stock layouts",
        "Shift Parallelism",
    ]
    return markdown(headings, rows)


def _beside_own(found: Kept) -> list[str]:
    rows = [
        [
            model,
            server,
            str(regret(found, model, server, AUTO)),
            *_kept_and_others(found, model, server),
        ]
        for model in MODELS
        for server in OURS
    ]
    headings = ["model", "server", "auto", "best layout kept for all loads", "other layouts"]
    return markdown(headings, rows)


def _kept_and_others(found: Kept, model: str, server: str) -> tuple[str, str]:
    """Return the cells of the best layout to keep, and of all others."""
    cells = {
        name: f"{regret(found, model, server, name)} ({name})"
        for name in _fixed(found, model, server)
    }
    kept = cells.pop(kept_for_all(found, model, server))
    return kept, "; ".join(cells.values())


def _fixed(found: Kept, model: str, server: str) -> list[str]:
    return fixed(found, Place(model, server, LOADS[0]))


def _best(found: Kept, model: str, server: str) -> Regret:
    return regret(found, model, server, kept_for_all(found, model, server))


def _range(found: Sequence[Regret]) -> str:
    """Return the least and the largest mean, and the worst load of all."""
    low, high = (number(end(one.mean for one in found)) for end in (min, max))
    worst = number(max(one.worst for one in found))
    return f"{low if low == high else f'{low} to {high}'} (worst load {worst})"
