"""`auto` beside stock vLLM, Shift Parallelism and our own fixed layouts on rare bursts, on long
prompts beside chat, on a day, and on loads that were not looked at before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from experiments import held_out_runs, run_history
from experiments.common import MODELS, Kept, Numbers, Setting, run, template
from experiments.loads_load import LOADS, UNSEEN, load
from experiments.rows import Row, markdown, number, page, paragraph, spread, write
from experiments.server_pages import NOTICES
from experiments.servers import GRAPHS, STOCK, is_fixed
from flying_lab.sim.node import System

SHIFT = "shift-parallel"
FIGURES = tuple(
    f"{statistic}_{name}_ms" for name in ("e2el", "ttft", "tpot") for statistic in ("mean", "p90")
)
E2E = FIGURES[0]
HEADINGS = ("E2E (s)", "P90", "TTFT (s)", "P90", "TPOT (ms)", "P90")


def measure(setting: Setting) -> Numbers:
    """By model, load and system: the figures of all requests, and switches."""
    return {
        model: {
            name: {
                one.name: measure_system(one, name, model, setting)
                for one in compared(model, setting)
            }
            for name in LOADS
        }
        for model in MODELS
    }


def compared(model: str, setting: Setting) -> Iterator[System]:
    """Yield the systems of our server with graphs, then stock's."""
    for server in (GRAPHS, STOCK):
        yield from held_out_runs.compared(server, model, setting)


def measure_system(one: System, name: str, model: str, setting: Setting) -> Numbers:
    """Serve a load with one system."""
    work = load(name, model, setting.seed)
    done = run(one, model, work)
    return {
        "requests": len(work.requests),
        "refused": len(done.outcome.refused),
        "switches": sum(switch.decided_s > 0 for switch in done.outcome.switches),
        **{figure: float(f"{done.summary[figure]:.5g}") for figure in FIGURES},
    }


# ---- what the runs show


def best(found: Kept, model: str, name: str, prefix: str) -> str:
    """Return the fixed layout with the least mean E2E over the seeds, kept for the whole load.

    `prefix`: `stock-` for stock vLLM, `static-` for our own server.
    """
    names = [one for one in found.seeds[0][model][name] if one.startswith(prefix)]
    return min(names, key=lambda one: mean(values(found, model, name, one, E2E)))


def values(found: Kept, model: str, name: str, system: str, figure: str) -> list[float]:
    """Return a figure of a system, for each seed."""
    return [float(one[model][name][system][figure]) for one in found.seeds]


def ratios(found: Kept, model: str, name: str, other: str, figure: str = E2E) -> list[float]:
    """Return a figure of `auto` over that of another system, for each seed."""
    ours, theirs = (values(found, model, name, one, figure) for one in ("auto", other))
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def headline(found: Kept) -> str:
    """Return in a sentence mean E2E beside the best single layout of stock vLLM, by load."""
    parts = []
    for name in LOADS:
        cells = [
            number(mean(ratios(found, model, name, best(found, model, name, "stock-"))))
            for model in MODELS
        ]
        parts.append(f"{name} {', '.join(cells)}")
    return (
        "Mean E2E of `auto` over that of the best *single* layout of stock vLLM, by load, for "
        f"{', '.join(MODELS)}: {'; '.join(parts)}."
    )


# ---- the page


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the page; it compares nothing with the paper."""
    runs = run_history.section("loads", found, run_cells(found))
    lines = [*paragraph(template("loads", seeds=len(found.seeds))), *_ratios(found), *runs]
    for model in MODELS:
        for name in LOADS:
            lines += [f"## {model}, {_titled(name)}", "", *_table(found, model, name)]
    sources = {"loads": found}
    write(folder, "loads", page("Other loads", sources, lines, NOTICES))
    return []


def run_cells(found: Kept) -> dict[str, str]:
    """Return what the list of all runs shows of one: mean E2E of `auto` beside the best layouts."""
    prefixes = {"stock": "stock-", "own": "static-"}
    return {
        f"{_titled(name)}, {model}: E2E / best single {whose} layout": spread(
            ratios(found, model, name, best(found, model, name, prefix))
        )
        for name in LOADS
        for model in MODELS
        for whose, prefix in prefixes.items()
    }


def _titled(name: str) -> str:
    return f"{name} (unseen)" if name in UNSEEN else name


def _ratios(found: Kept) -> list[str]:
    rows = []
    for name in LOADS:
        for model in MODELS:
            stock, own = (best(found, model, name, prefix) for prefix in ("stock-", "static-"))
            rows.append(
                [
                    _titled(name),
                    model,
                    f"{spread(ratios(found, model, name, stock))} (`{stock}`)",
                    spread(ratios(found, model, name, stock, "p90_ttft_ms")),
                    f"{spread(ratios(found, model, name, own))} (`{own}`)",
                    spread(ratios(found, model, name, SHIFT)),
                    spread(values(found, model, name, "auto", "switches")),
                ]
            )
    headings = [
        "load",
        "model",
        "E2E / best single stock layout",
        "P90 TTFT / the same layout's",
        "E2E / best single layout of our own server",
        "E2E / Shift Parallelism",
        "switches",
    ]
    return ["## `auto` beside the others", "", *markdown(headings, rows)]


def _table(found: Kept, model: str, name: str) -> list[str]:
    rows = []
    for system in found.seeds[0][model][name]:
        cells = []
        for figure in FIGURES:
            scale = 1.0 if "tpot" in figure else 1e3
            there = values(found, model, name, system, figure)
            cells.append(number(mean(there) / scale))
        refused = sum(values(found, model, name, system, "refused"))
        kind = "fixed" if is_fixed(system) else ""
        rows.append([system, kind, *cells, number(refused)])
    return markdown(["system", "", *HEADINGS, "refused"], rows)
