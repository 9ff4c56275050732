"""DynaServe without an oracle: `split` with exact, wrong and learned lengths, beside disaggregated
and colocated serving. The plan is in experiments/plans/dynaserve.md.

Its tables are on the page of `experiments/dynaserve.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import get_args

from experiments.common import Kept, Numbers, Setting, template
from experiments.dynaserve_runs import (
    HYBRID,
    LEAST_KEPT,
    Draw,
    highest,
    lengths,
    requests,
    serve,
    server,
)
from experiments.rows import Row, markdown, paragraph, spread
from flying_lab.sim.announced import Source, announcing
from flying_lab.workload.model import Request

RATES = {"BurstGPT": 15.0, "Azure Code": 6.1, "arXiv": 1.3, "Mini Reasoning": 3.5, HYBRID: 8.8}
"""Requests per second at which all systems are compared."""
CHUNKS = (512, 1024, 2048, 8192)
"""Tokens of a step of colocated serving."""
MOST_TOKENS = 32_768
"""Output tokens that clients of `split` ask for at most."""
PAYS, NO_LESS, WORKLOADS_PAID = 1.05, 0.95, 3
"""The rule of the verdict: capacity over that of colocated serving where a split pays, and in the
other workloads; in how many it has to pay.
"""
SOURCES: Mapping[str, str] = {
    "exact": "exact",
    "error-20": "error 20 %",
    "error-40": "error 40 %",
    "production": "production",
}
"""Headings of the kinds of lengths."""
OTHERS: Mapping[str, str] = {
    "disagg": "disaggregated",
    **{f"coloc {chunk}": f"colocated {chunk:,}" for chunk in CHUNKS},
}
"""Headings of the systems beside `split`."""


def measure(setting: Setting) -> Numbers:
    """All systems in each workload."""
    return {name: _in_workload(name, setting.seed) for name in RATES}


def _in_workload(name: str, seed: int) -> Numbers:
    draw = lengths(name)
    offered = requests(draw, RATES[name], seed)
    found: Numbers = {
        source: _splitting(source, draw, offered, seed) for source in get_args(Source)
    }
    found["disagg"] = serve(server("disagg"), offered).figures
    for chunk in CHUNKS:
        found[f"coloc {chunk}"] = serve(server("coloc", chunk), offered).figures
    return found


def _splitting(source: Source, draw: Draw, offered: Sequence[Request], seed: int) -> Numbers:
    """`split` with one kind of lengths: at the common rate, and the highest rate that it
    sustains.
    """
    one = announcing(server("split"), source, seed, MOST_TOKENS)
    run = serve(one, offered)
    counts = run.node.controller.state.splits.counts
    rps, _ = highest(one, draw, seed, lambda found: found.sustained)
    return {
        **run.figures,
        "rps": rps,
        "split": (counts.prompt + counts.output) / len(offered),
        "replanned": counts.replanned / len(offered),
        "moved": counts.moved / len(offered),
    }


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write nothing: the tables are on the page of `dynaserve`."""
    return []


# ---- the part of the page


def lines(found: Kept, page: Kept) -> list[str]:
    """The tables and the verdict; `page`: the numbers of the page's other tables."""
    return [
        "## Without an oracle",
        "",
        *paragraph(template("dynaserve_lengths", tokens=f"{MOST_TOKENS:,}")),
        *_verdict(found, page),
        *_capacities(found, page),
        *_remarks_at_rate(found),
        *_at_rate(found, "goodput", "tokens/s within the target", 1.0),
        *_at_rate(found, "attainment", "% of gaps within the target", 100.0),
        *_at_rate(found, "waiting", "% of requests without a second token", 100.0),
        *_planner(found),
    ]


def over_colocated(found: Kept, page: Kept, name: str) -> float:
    """Capacity with learned lengths over that of the better colocated server, mean of the seeds."""
    return mean(
        mine[name]["production"]["rps"] / _colocated(other, name)
        for mine, other in zip(found.seeds, page.seeds, strict=False)
    )


def is_for_auto(found: Kept, page: Kept) -> bool:
    """Whether `auto` should split, by the rule of the plan."""
    ratios = [over_colocated(found, page, name) for name in RATES]
    return sum(ratio >= PAYS for ratio in ratios) >= WORKLOADS_PAID and min(ratios) >= NO_LESS


def _colocated(page: Numbers, name: str) -> float:
    """Capacity of the better of both colocated servers: tuned, and to the target."""
    of_workload = page["capacity"][name]
    return float(max(of_workload[system]["rps"] for system in ("coloc", "coloc to target")))


def _verdict(found: Kept, page: Kept) -> list[str]:
    ratios = {name: over_colocated(found, page, name) for name in RATES}
    over_exact = [_over_exact(found, name) for name in RATES]
    pays = [f"{name} ({ratio:.2f})" for name, ratio in ratios.items() if ratio >= PAYS]
    text = template(
        "dynaserve_lengths_verdict",
        should="should" if is_for_auto(found, page) else "should not",
        pays=f"in {', '.join(pays)}" if pays else "in none of the workloads",
        least=f"{min(ratios.values()):.2f}",
        most=f"{max(ratios.values()):.2f}",
        exact_least=f"{min(over_exact):.2f}",
        exact_most=f"{max(over_exact):.2f}",
    )
    return paragraph(text)


def _remarks_at_rate(found: Kept) -> list[str]:
    """What the tables at one rate show."""
    long = f"coloc {CHUNKS[-1]}"
    shares = [
        mean(_of(found, name, long, "goodput")) / mean(_of(found, name, "production", "goodput"))
        for name in RATES
    ]
    text = template(
        "dynaserve_lengths_at_rate",
        steps="; ".join(f"{name} {_steps_within(found, name)}" for name in RATES),
        long=f"{CHUNKS[-1]:,}",
        long_least=f"{min(shares):.2f}",
        long_most=f"{max(shares):.2f}",
    )
    return paragraph(text)


def _steps_within(found: Kept, name: str) -> str:
    """The steps of colocated serving that keep to the target in a workload."""
    kept = [
        f"{chunk:,}"
        for chunk in CHUNKS
        if mean(_of(found, name, f"coloc {chunk}", "attainment")) >= LEAST_KEPT
    ]
    return ", ".join(kept) or "none"


def _over_exact(found: Kept, name: str) -> float:
    """Capacity with learned lengths over that with exact ones, mean of the seeds."""
    exact, learned = (_of(found, name, source, "rps") for source in ("exact", "production"))
    return mean(a / b for a, b in zip(learned, exact, strict=True))


def _of(found: Kept, name: str, system: str, figure: str) -> list[float]:
    return [float(one[name][system][figure]) for one in found.seeds]


def _capacities(found: Kept, page: Kept) -> list[str]:
    """The highest rate that `split` sustains with each kind of lengths."""
    cells = []
    for name in RATES:
        colocated = [_colocated(one, name) for one in page.seeds]
        ratio = over_colocated(found, page, name)
        cells.append(
            [
                name,
                *(spread(_of(found, name, source, "rps")) for source in SOURCES),
                f"{_over_exact(found, name):.2f}",
                spread(colocated),
                f"{ratio:.2f}{' **pays**' if ratio >= PAYS else ''}",
            ]
        )
    headings = ["workload", *SOURCES.values(), "production / exact"]
    return markdown([*headings, "colocated, the better", "production / colocated"], cells)


def _at_rate(found: Kept, figure: str, title: str, scale: float) -> list[str]:
    """One figure of all systems at the common rate."""
    cells = [
        [
            f"{name}, {rate:g}/s",
            *(
                spread([value * scale for value in _of(found, name, system, figure)])
                for system in (*SOURCES, *OTHERS)
            ),
        ]
        for name, rate in RATES.items()
    ]
    return markdown([title, *SOURCES.values(), *OTHERS.values()], cells)


def _planner(found: Kept) -> list[str]:
    """What the planner did: the shares of requests that were split, planned again, and moved."""
    cells = [
        [
            name,
            *(
                " / ".join(
                    f"{100 * mean(_of(found, name, source, figure)):.2g}"
                    for figure in ("split", "replanned", "moved")
                )
                for source in SOURCES
            ),
        ]
        for name in RATES
    ]
    return markdown(["% split / planned again / moved", *SOURCES.values()], cells)
