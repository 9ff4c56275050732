"""Gyges (arXiv 2509.19729): weights lent to the KV cache, engines that join and part, beside what
the paper reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from experiments import gyges_derived as derived
from experiments.common import Kept, Numbers, Setting
from experiments.gyges_rows import (
    end_to_end_rows,
    kv_rows,
    padding_rows,
    scheduler_rows,
    step_rows,
    table1_rows,
    table3_rows,
    weight_rows,
)
from experiments.gyges_runs import (
    FACTORS,
    RATES,
    ROUTES,
    SCHEDULED_S,
    SYSTEMS,
    TRACE_S,
    scheduled,
    serve,
    server,
    traced,
)
from experiments.reasons import why
from experiments.rows import Row, markdown, number, page, paragraph, spread, table, write

SECTIONS: tuple[tuple[str, str, Callable[[Kept], list[Row]]], ...] = (
    ("table1", "## Table 1: degrees", table1_rows),
    ("table3", "## Table 3: 2 MiB pages of a feed-forward tensor", table3_rows),
    ("padding", "## Pages that units share", padding_rows),
    ("kv", "## KV cache, four engines of one device to degree 4", kv_rows),
    ("weights", "## Weights, the same", weight_rows),
    ("step", "## Both, beside steps", step_rows),
    ("scheduler", "## Scheduler", scheduler_rows),
    ("trace", "## End to end", end_to_end_rows),
)


def measure(setting: Setting) -> Numbers:
    """Every table."""
    return {
        **measure_derived(),
        "scheduler": {str(factor): _scheduled(factor, setting.seed) for factor in FACTORS},
        "trace": {str(rate): _traced(rate, setting.seed) for rate in RATES},
    }


def measure_derived() -> Numbers:
    """All that needs no request."""
    return {
        "table1": derived.table1(),
        "lending": derived.lending(),
        "pages": derived.pages(),
        "padding": derived.padding(),
        "ffn_longer": derived.ffn_longer(),
        "weights": derived.weights(),
        "transformation": derived.transformation(),
    }


def _scheduled(factor: float, seed: int) -> Numbers:
    offered = scheduled(factor, seed)
    return {name: serve(server(name), offered, SCHEDULED_S, drain=False) for name in ROUTES}


def _traced(rate: float, seed: int) -> Numbers:
    offered = traced(rate, seed)
    return {name: serve(server(name), offered, TRACE_S, drain=True) for name in SYSTEMS}


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the page; nothing of it counts in against_paper.md, which is about another paper."""
    lines = paragraph(
        "Qwen2.5-32B on H20 with the paper's 14.3 GB of activations, engines of one device, "
        "groups of four.",
        "*Derived*: arithmetic over sizes, rates and the driver's calls; no request is served. "
        "*Private trace*: the",
        "paper's is not published, ours has other requests. Workloads and what was decided "
        "before the first run are in",
        f"[settings.md](settings.md). Means of {len(found.seeds)} seeds [smallest..largest].",
    )
    shown = {"table1": _lending_lines, "padding": _padding_lines, "step": _time_lines}
    shown |= {"scheduler": _scheduler_lines, "trace": _trace_lines}
    compared: list[Row] = []
    for name, title, rows_of in SECTIONS:
        extra = shown[name](found) if name in shown else []
        rows = why("gyges", name, rows_of(found))
        lines += [title, "", *extra, *table(rows)]
        compared += rows
    write(
        folder,
        "gyges",
        page("Gyges: weights lent to the KV cache", {"gyges": found}, lines, ("gyges",)),
    )
    return compared


def _lending_lines(found: Kept) -> list[str]:
    lending = found.seeds[0]["lending"]
    cells = [
        [name, *(number(tokens) for tokens in lending[name].values())]
        for name in ("nothing", "mlp", "all")
    ]
    return [
        *paragraph(
            "The paper's rows are fixed servers. Groups of engines that each hold all weights "
            "hold eight sequences of",
            "this many tokens, with feed-forward weights lent (`mlp`, what the paper does) or "
            "all that are divided:",
        ),
        *markdown(["lent", "degree 1", "degree 2", "degree 4"], cells),
    ]


def _padding_lines(found: Kept) -> list[str]:
    cells = [
        [model, *(f"{share[key]:.2%}" for key in ("stranded", "worst", "padded"))]
        for model, share in found.seeds[0]["padding"].items()
    ]
    return [
        *paragraph(
            "Shares of feed-forward weights cut in four (`flying_lab/sim/padding.py`). "
            "*Stranded*: bytes "
            "of others on pages",
            "that a kept unit shares, mean of the four ranks and the worst one. *Padded*: zeros, "
            "whole rows, that let",
            "each unit begin with a page (the paper's equation 2).",
        ),
        *markdown(["model", "stranded", "worst rank", "padded"], cells),
    ]


WORKS = {
    "kv": "KV in place, in chunks of 32 MiB",
    "trimmed": "KV, received beside, then trimmed",
    "lend": "weights lent",
    "swapped": "weights lent after a partial swap",
    "up": "joining: KV in place, weights lent",
    "back": "parting: KV in place, weights read back from peers",
    "seesaw": "Seesaw: KV and new weights through host memory",
}


def _time_lines(found: Kept) -> list[str]:
    one = found.seeds[0]["transformation"]
    cells = [
        [text, *(number(one[key][name] * 1e3) for key in ("apart_s", "taken_s"))]
        for name, text in WORKS.items()
    ]
    delays = number(one["up_delay_s"]), number(one["back_delay_s"])
    return [
        *paragraph(
            "Milliseconds at 90 % of KV memory, where a decode step takes "
            f"{number(one['step_s'] * 1e3)}. *Apart*:",
            "nothing else is done. *Staggered*: by how much all steps together get longer if a "
            "transformation is",
            "spread over so many that none does by more than 1 %; joining then takes "
            f"{delays[0]} s, parting",
            f"{delays[1]} s.",
        ),
        *markdown(["", "apart (ms)", "staggered (ms)"], cells),
    ]


def _scheduler_lines(found: Kept) -> list[str]:
    rates = [(str(factor), f"{factor}x") for factor in FACTORS]
    return [
        *paragraph(
            "The paper's rates, and multiples of them. Times are of requests that have ended "
            "when arrivals do.",
        ),
        *_runs(found, "scheduler", rates, ROUTES),
    ]


def _trace_lines(found: Kept) -> list[str]:
    return [
        *paragraph(
            "Requests with lengths of Mooncake's conversations. Pipelines and sequence "
            "parallelism are modelled as the",
            "best that they can be, all engines busy; *serial* is what the paper says of them, "
            "one engine works at a",
            "time. The paper has one number for all rates and baselines: compared is, for each "
            "baseline, the rate at",
            "which ours is furthest ahead. Refused are requests for more tokens than four "
            "engines hold.",
        ),
        *_runs(found, "trace", [(str(rate), str(rate)) for rate in RATES], SYSTEMS),
    ]


def _runs(
    found: Kept, section: str, rates: Sequence[tuple[str, str]], names: Sequence[str]
) -> list[str]:
    """A line for each rate and system."""
    cells = []
    for key, shown in rates:
        for name in names:
            runs = [one[section][key][name] for one in found.seeds]
            figures = [
                [
                    run["tokens_per_s"],
                    run["ttft_s"],
                    run["tpot_s"] * 1e3,
                    run["joined"],
                    run["refused"],
                ]
                for run in runs
            ]
            cells.append([shown, name, *(spread(values) for values in zip(*figures, strict=True))])
    headings = ["output tokens/s", "mean TTFT (s)", "mean TPOT (ms)", "times joined", "refused"]
    return markdown(["requests/s", "system", *headings], cells)
