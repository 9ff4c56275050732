"""DynaServe (arXiv 2504.09285): requests split over two A100, beside colocated and disaggregated
serving.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np

from experiments import dynaserve_lengths
from experiments.common import Kept, Numbers, Setting, kept, template
from experiments.dynaserve_runs import (
    CHUNKS,
    HYBRID,
    SHAPES,
    WORKLOADS,
    Draw,
    highest,
    lengths,
    normal,
    plans_timed,
    requests,
    serve,
    server,
)
from experiments.reasons import why
from experiments.rows import Row, markdown, page, paragraph, row, spread, table, write
from flying_lab.sim.node import System

TABLE1: dict[str, dict[str, dict[str, float]]] = {
    "P8192-D32": {
        "disagg": {"rps": 0.83, "p50_ms": 22.70, "p99_ms": 58.09, "attainment": 1.0},
        "coloc": {"rps": 1.49, "p50_ms": 309.68, "p99_ms": 352.93, "attainment": 0.0173},
    },
    "P2048-D512": {
        "disagg": {"rps": 2.56, "p50_ms": 47.00, "p99_ms": 65.11, "attainment": 0.9983},
        "coloc": {"rps": 2.83, "p50_ms": 46.86, "p99_ms": 336.81, "attainment": 0.8409},
    },
    "P219-D1467": {
        "disagg": {"rps": 1.68, "p50_ms": 50.63, "p99_ms": 74.47, "attainment": 0.9995},
        "coloc": {"rps": 2.86, "p50_ms": 47.99, "p99_ms": 162.67, "attainment": 0.9446},
    },
}
"""The paper's; rates are those at which it saturates each server."""
RANGES = {"coloc": (1.15, 3.07), "disagg": (1.09, 1.67)}
"""Of the paper's capacity of DynaServe beside them, over its four workloads; the figure that has
each is lost.
"""
MEANS = {"coloc": 2.37, "disagg": 1.37}
BEST_GOODPUT = {"coloc": 1.91, "disagg": 1.61}
HYBRID_RPS = {"coloc": 4.6, "disagg": 5.9, "split": 7.4}
HYBRID_GOODPUT = {"coloc": 316.32, "disagg": 399.31, "split": 473.84}
WITHIN = {"without": 0.52, "with": 0.99}
HIDDEN = 0.94
GOODPUT = {0: 3606.93, 10: 3591.00, 50: 3564.90, 100: 3501.85}
"""Tokens per second by the standard deviation of outputs (table 4)."""
PLAN_MS = (13.70, 17.47)
NAMES = {"disagg": "disaggregated", "coloc": "colocated", "split": "split"}


def measure(setting: Setting) -> Numbers:
    """Every table."""
    capacity = {name: _capacities(name, setting.seed) for name in (*WORKLOADS, HYBRID)}
    return {
        "table1": {name: _table1(name, setting.seed) for name in SHAPES},
        "capacity": capacity,
        "batches": _batches(capacity["BurstGPT"]["split"]["rps"], setting.seed),
        "pulls": _pulls(capacity["Mini Reasoning"]["split"]["rps"], setting.seed),
        "lengths": _lengths(setting.seed),
    }


def _table1(name: str, seed: int) -> Numbers:
    """At the paper's rate, and the highest one that the server keeps up with, whatever its gaps."""
    found, draw = {}, lengths(name)
    for system, published in TABLE1[name].items():
        one = server("disagg" if system == "disagg" else "coloc")
        most, _ = highest(one, draw, seed, lambda run: run.keeps_up)
        found[system] = {"rps": most, **serve(one, requests(draw, published["rps"], seed)).figures}
    return found


def _capacities(name: str, seed: int) -> Numbers:
    """By system: the highest sustained rate and what is so there; and all at the rate that `split`
    sustains.
    """
    draw, found = lengths(name), {}
    for system in ("split", "disagg", "coloc to target"):
        found[system] = _capacity(server(system), draw, seed)  # type: ignore[arg-type]
    tuned = {chunk: _capacity(server("coloc", chunk), draw, seed) for chunk in CHUNKS}
    chunk = max(CHUNKS, key=lambda tokens: tuned[tokens]["rps"])
    found["coloc"] = {**tuned[chunk], "chunk": chunk}
    offered = requests(draw, found["split"]["rps"], seed)
    found["disagg"]["at_split"] = serve(server("disagg"), offered).figures["goodput"]
    found["coloc"]["at_split"] = serve(server("coloc", chunk), offered).figures["goodput"]
    return found


def _capacity(one: System, draw: Draw, seed: int) -> Numbers:
    rate, best = highest(one, draw, seed, lambda run: run.sustained)
    return {"rps": rate, **best.figures}


def _batches(rate: float, seed: int) -> Numbers:
    """Gaps within the target, with batches to it and without; and what planning took, of the run
    with them.
    """
    offered = requests(lengths("BurstGPT"), rate, seed)
    without = serve(server("split", target_s=math.inf), offered).figures["attainment"]
    with plans_timed() as planned:
        run = serve(server("split"), offered)
    planned_ms = [1e3 * timed.took_s for timed in planned]
    counts = run.node.controller.state.splits.counts
    return {
        "without": without,
        "with": run.figures["attainment"],
        "plan_ms": {str(part): float(np.percentile(planned_ms, part)) for part in (50, 99)},
        "probes": max(timed.probes for timed in planned),
        "split": (counts.prompt + counts.output) / len(offered),
    }


def _pulls(rate: float, seed: int) -> Numbers:
    """Mean seconds that a handoff is waited for, pulled behind the computation and, of the same
    handoffs, all at once.
    """
    one, offered = server("split"), requests(lengths("Mini Reasoning"), rate, seed)
    handoffs, cost = serve(one, offered).node.parts.handoffs, one.shape.migrations[1]
    return {
        "behind": mean(handoff.waited_s for handoff in handoffs),
        "at_once": mean(cost.seconds(handoff.tokens) for handoff in handoffs),
    }


def _lengths(seed: int) -> Numbers:
    """Goodput at the highest rate that is sustained without errors, by the deviation of outputs
    from the hint.
    """
    one = server("split", hint=lambda _: 1467)
    # the length that clients ask for would tell more than the hint
    one = replace(one, max_tokens=lambda _: dynaserve_lengths.MOST_TOKENS)
    rate, _ = highest(one, normal(0), seed, lambda run: run.sustained)
    return {
        str(sigma): serve(one, requests(normal(sigma), rate, seed)).figures["goodput"]
        for sigma in GOODPUT
    }


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the page; nothing of it counts in against_paper.md, which is about another paper."""
    apart = kept("dynaserve_lengths")
    tables = {name: why("dynaserve", name, rows_of(found)) for name, rows_of in ROWS.items()}
    lines = [
        *paragraph(
            "Qwen2.5-14B on two modelled A100, target 100 ms between tokens. *split* is our "
            "server: `policy/split.py`",
            "over both engines, batches to the target, clients that say how long outputs will "
            "be; *disaggregated* and",
            "*colocated* are stock vLLM, the latter with round robin. Poisson arrivals for 150 "
            "s; gaps and tokens",
            "count from 50 s on. A rate is sustained if 99 % of gaps are within the target and "
            "at most 5 % of requests",
            "have no second token at the end; rates are on a grid of 4.5 %. Workloads are "
            "described in",
            f"[settings.md](settings.md). Means of {len(found.seeds)} seeds [smallest..largest].",
        ),
        "## What the product has",
        "",
        *paragraph(template("dynaserve_product")),
        *dynaserve_lengths.lines(apart, found),
        "## Table 1: at the paper's rates",
        "",
        "The highest rate that a server keeps up with, whatever its gaps; the rest at the rate "
        "of the paper's table.",
        "",
        *table(tables["table1"]),
        "## Capacity",
        "",
        *_capacity_lines(found),
        *table(tables["capacity"]),
        "## Goodput",
        "",
        "Tokens per second within the target, of all systems at the rate that `split` sustains.",
        "",
        *table(tables["goodput"]),
        "## Hybrid workload",
        "",
        *table(tables["hybrid"]),
        "## Inside",
        "",
        *table(tables["inside"]),
        *_planner_lines(found),
    ]
    title = "DynaServe: requests split over two engines"
    sources = {"dynaserve": found, "dynaserve_lengths": apart}
    write(folder, "dynaserve", page(title, sources, lines, ("dynaserve",)))
    return [one for rows in tables.values() for one in rows]


def _table1_rows(found: Kept) -> list[Row]:
    better = {"rps": True, "p50_ms": False, "p99_ms": False, "attainment": True}
    return [
        row(
            f"{shape}, {NAMES[name]}: {key}",
            value,
            found,
            lambda one, s=shape, n=name, k=key: one["table1"][s][n][k],
        )  # type: ignore[misc]
        for shape, systems in TABLE1.items()
        for name, values in systems.items()
        for key, value in values.items()
        if key in better
    ]


def _of(name: str, system: str, key: str) -> Callable[[Numbers], float]:
    return lambda one: float(one["capacity"][name][system][key])


def _over(name: str, system: str) -> Callable[[Numbers], float]:
    """Capacity of `split` over that of another system."""
    return lambda one: _of(name, "split", "rps")(one) / _of(name, system, "rps")(one)


def _capacity_lines(found: Kept) -> list[str]:
    """Every system's capacity with the time to first token there, and where it misses the bar of
    the paper.
    """
    systems = ("split", "disagg", "coloc", "coloc to target")
    cells = []
    for name in (*WORKLOADS, HYBRID):
        line = [name]
        for system in systems:
            rps, ttft = (
                [_of(name, system, key)(one) for one in found.seeds] for key in ("rps", "ttft_s")
            )
            line.append(f"{spread(rps)}, {mean(ttft):.2g} s")
        line.append(", ".join(str(one["capacity"][name]["coloc"]["chunk"]) for one in found.seeds))
        for system, (least, _) in RANGES.items():
            value = mean(_over(name, system)(one) for one in found.seeds)
            line.append(f"{value:.2f} {'yes' if value >= least else '**no**'}")
        cells.append(line)
    headings = [
        "workload",
        *("split", "disaggregated", "colocated, tuned", "colocated to the target"),
        "chunk",
    ]
    headings += [f"split / {NAMES[name]}, at least {least}?" for name, (least, _) in RANGES.items()]
    return [
        *paragraph(
            "Highest sustained rate in requests/s, and the median time to first token at it, "
            "which the target leaves",
            "free. *Colocated to the target* is colocated serving with our batches "
            "(`--tbt-slo-ms`) and no split; the",
            "paper has no such baseline. *chunk*: tokens of a step with which colocated serving "
            "sustains most.",
        ),
        *markdown(headings, cells),
    ]


def _capacity_rows(found: Kept) -> list[Row]:
    rows = [
        row(
            f"{name}: split / {NAMES[system]}",
            RANGES[system],
            found,
            _over(name, system),
            higher=True,
        )
        for name in WORKLOADS
        for system in RANGES
    ]
    for system, value in MEANS.items():
        means = lambda one, s=system: mean(_over(name, s)(one) for name in WORKLOADS)  # type: ignore[misc] # noqa: E731
        rows.append(
            row(f"mean of the four: split / {NAMES[system]}", value, found, means, higher=True)
        )
    return rows


def _goodput_rows(found: Kept) -> list[Row]:
    def most(one: Numbers, system: str) -> float:
        return max(
            _of(name, "split", "goodput")(one) / _of(name, system, "at_split")(one)
            for name in WORKLOADS
        )

    return [
        row(
            f"most of the four: split / {NAMES[system]}",
            value,
            found,
            lambda one, s=system: most(one, s),
            higher=True,
        )  # type: ignore[misc]
        for system, value in BEST_GOODPUT.items()
    ]


def _hybrid_rows(found: Kept) -> list[Row]:
    rows = [
        row(
            f"{NAMES[name]}: requests/s",
            rps,
            found,
            _of(HYBRID, name, "rps"),
            higher=True if name == "split" else None,
        )
        for name, rps in HYBRID_RPS.items()
    ]
    rows += [
        row(f"{NAMES[name]}: goodput (tokens/s)", tokens, found, _of(HYBRID, name, "goodput"))
        for name, tokens in HYBRID_GOODPUT.items()
    ]
    return rows + [
        row(
            f"requests/s, split / {NAMES[name]}",
            HYBRID_RPS["split"] / HYBRID_RPS[name],
            found,
            _over(HYBRID, name),
            higher=True,
        )
        for name in RANGES
    ]


def _inside_rows(found: Kept) -> list[Row]:
    rows = [
        row(
            f"gaps within the target, {name} batches to it",
            value,
            found,
            lambda one, n=name: one["batches"][n],
        )  # type: ignore[misc]
        for name, value in WITHIN.items()
    ]
    rows.append(
        row(
            "share of the waiting for KV that pulling behind the computation hides",
            HIDDEN,
            found,
            lambda one: 1.0 - one["pulls"]["behind"] / one["pulls"]["at_once"],
            higher=True,
        )
    )
    rows.append(
        row(
            "P219-D1467, exact outputs: goodput (tokens/s)",
            GOODPUT[0],
            found,
            lambda one: one["lengths"]["0"],
        )
    )
    for sigma, tokens in GOODPUT.items():
        if sigma:
            share = lambda one, s=sigma: one["lengths"][str(s)] / one["lengths"]["0"]  # type: ignore[misc] # noqa: E731
            rows.append(
                row(
                    f"deviation of {sigma} tokens: goodput / exact",
                    tokens / GOODPUT[0],
                    found,
                    share,
                    True,
                )
            )
    return rows


def _planner_lines(found: Kept) -> list[str]:
    times = {
        part: [one["batches"]["plan_ms"][part] for one in found.seeds] for part in ("50", "99")
    }
    probes = max(one["batches"]["probes"] for one in found.seeds)
    share = mean(one["batches"]["split"] for one in found.seeds)
    return paragraph(
        f"Planning a request takes {spread(times['50'])} ms at the median and "
        f"{spread(times['99'])} ms at the 99th",
        f"percentile (processor time, Python, BurstGPT), the sums over its groups included, with "
        f"at most {probes} probes; the paper's scheduler takes",
        f"{PLAN_MS[0]} to {PLAN_MS[1]} ms per request. {share:.0%} of these requests are split.",
    )


ROWS: Mapping[str, Callable[[Kept], list[Row]]] = {
    "table1": _table1_rows,
    "capacity": _capacity_rows,
    "goodput": _goodput_rows,
    "hybrid": _hybrid_rows,
    "inside": _inside_rows,
}
"""What is compared with the paper, by section of the page."""
