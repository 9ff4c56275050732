"""`auto` over the whole load of docs/lab/results/phases.md: beside the best single layout of stock
vLLM, beside Shift Parallelism, and beside the fixed layouts of our own server.

Means over the whole load are those of its phases, weighted by their requests.
"""

from __future__ import annotations

from statistics import mean
from typing import NamedTuple

from experiments.common import MODELS, Kept, Numbers, template
from experiments.phases_load import PHASES
from experiments.rows import markdown, number, paragraph, spread
from experiments.servers import GRAPHS, PRODUCT, STOCK, is_fixed

OURS = (GRAPHS, PRODUCT)
SHIFT = "shift-parallel"
E2E, TTFT = "mean_e2el_ms", "mean_ttft_ms"


class Best(NamedTuple):
    """The fixed layout of a server with the least mean over the seeds, and ratios to it by seed."""

    name: str
    ratios: list[float]

    @property
    def mean(self) -> float:
        """Of the seeds."""
        return mean(self.ratios)


def whole(run: Numbers, figure: str) -> float:
    """Return the mean of a figure over all requests of a run."""
    phases = [run["phases"][phase] for phase in PHASES]
    return sum(one[figure] * one["requests"] for one in phases) / sum(
        one["requests"] for one in phases
    )


def beside(found: Kept, model: str, server: str, other: str, figure: str = E2E) -> Best:
    """Return `auto` of a server over the single best fixed layout of another one, kept for the
    whole load.
    """
    names = [name for name in found.seeds[0][model][other] if is_fixed(name)]
    found_all = [over(found, model, server, other, name, figure) for name in names]
    return max(found_all, key=lambda one: one.mean)


def over(found: Kept, model: str, server: str, other: str, name: str, figure: str = E2E) -> Best:
    """Return `auto` of a server over one system of another one."""
    return Best(
        name,
        [
            whole(one[model][server]["auto"], figure) / whole(one[model][other][name], figure)
            for one in found.seeds
        ],
    )


def by_phase(found: Kept, model: str, server: str) -> list[float]:
    """Return `auto` over the stock layout that is the best in each phase, mean E2E."""
    return [
        mean(
            one[model][server]["auto"]["phases"][phase][E2E]
            / min(
                run["phases"][phase][E2E]
                for name, run in one[model][STOCK].items()
                if is_fixed(name)
            )
            for one in found.seeds
        )
        for phase in PHASES
    ]


def switches(found: Kept, model: str, server: str) -> list[float]:
    """Return how often `auto` switched, for each seed."""
    return [float(len(one[model][server]["auto"]["switches"])) for one in found.seeds]


def headline(found: Kept) -> str:
    """Return in a sentence `auto` beside the best single layout of stock vLLM, then beside Shift
    Parallelism.
    """
    parts, beside_shift = [], []
    for server in OURS:
        stock = [beside(found, model, server, STOCK) for model in MODELS]
        shown = ", ".join(f"{number(one.mean)} (`{one.name}`)" for one in stock)
        parts.append(f"{shown} {server}")
        shift = [number(over(found, model, server, STOCK, SHIFT).mean) for model in MODELS]
        beside_shift.append(f"{', '.join(shift)} {server}")
    return (
        "Over the whole load, mean E2E of `auto` over that of the best *single* layout of stock "
        f"vLLM, by model: {'; '.join(parts)}. Over Shift Parallelism, as it is modelled: "
        f"{'; '.join(beside_shift)}."
    )


def section(found: Kept) -> list[str]:
    """Return the first section of the page."""
    rows = [
        [
            model,
            server,
            *_stock(found, model, server),
            ", ".join(number(ratio) for ratio in by_phase(found, model, server)),
            spread(over(found, model, server, STOCK, SHIFT).ratios),
            _named(beside(found, model, server, server)),
            spread(switches(found, model, server)),
        ]
        for model in MODELS
        for server in OURS
    ]
    headings = [
        "model",
        "server",
        "E2E / best single stock layout",
        "TTFT / the least of a single stock layout",
        f"E2E by phase ({', '.join(PHASES)}) / stock's best in it",
        "E2E / Shift Parallelism",
        "E2E / best single layout of our own server",
        "switches",
    ]
    text = paragraph(template("phases_whole"))
    return ["## The whole load", "", *text, *markdown(headings, rows)]


def _stock(found: Kept, model: str, server: str) -> list[str]:
    return [_named(beside(found, model, server, STOCK, figure)) for figure in (E2E, TTFT)]


def _named(best: Best) -> str:
    return f"{spread(best.ratios)} ({best.name})"
