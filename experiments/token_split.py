"""What would be ahead of every layout: prompts split by tokens over all engines, outputs apart."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from experiments import token_split_runs
from experiments.common import MODELS, Kept, Numbers, Setting, template
from experiments.rows import Row, markdown, page, paragraph, spread, write
from experiments.token_split_runs import (
    CELLS,
    FIGURES,
    LANES,
    OUTPUTS,
    SHOWN_PROMPT,
    Cell,
    fixed_systems,
)

AHEAD = 0.95
"""Of the least mean E2E of all fixed layouts."""
CELLS_AHEAD, MODELS_AHEAD = 4, 2
"""Of six cells, in which the lane is worth building for a model; of three models, for any."""
MILLISECONDS = 1e3


def measure(setting: Setting) -> Numbers:
    """By model: a prompt's time, capacities, and the figures of each system in each cell."""
    return {model: token_split_runs.measure_model(model, setting) for model in MODELS}


# ---- comparisons


def best(of_cell: Numbers, model: str, figure: str) -> tuple[float, str]:
    """The least value of a figure of all fixed layouts, and the layout that has it."""
    return min((float(of_cell[name][figure]), name) for name in fixed_systems(model))


def ratios(found: Kept, cell: Cell, system: str, figure: str) -> list[float]:
    """A system's figure over that of the best fixed layout, for each seed."""
    runs = [one[cell.model][cell.name] for one in found.seeds]
    return [float(run[system][figure]) / best(run, cell.model, figure)[0] for run in runs]


def is_ahead(found: Kept, cell: Cell, system: str) -> bool:
    """Whether its mean E2E is ahead of every fixed layout's with every seed."""
    return max(ratios(found, cell, system, "mean_e2e_s")) <= AHEAD


def cells_ahead(found: Kept, model: str, system: str) -> int:
    """In how many of the model's cells a system is ahead."""
    return sum(is_ahead(found, cell, system) for cell in CELLS if cell.model == model)


def is_worth_building(found: Kept) -> bool:
    """The verdict, by the rule of the plan."""
    worth = [cells_ahead(found, model, "token-split") >= CELLS_AHEAD for model in MODELS]
    return sum(worth) >= MODELS_AHEAD


# ---- the page


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the page; it compares nothing with the paper."""
    lines = [*_ratios(found), *_prompts(found), *_rows(found)]
    title = "Prompts split by tokens, outputs apart: an upper bound"
    notices = ("simulated", "gpt_oss")
    write(folder, "token_split", page(title, {"token_split": found}, lines, notices))
    return []


def _ratios(found: Kept) -> list[str]:
    lines = ["## Beside the best fixed layout", ""]
    for system in LANES:
        headings = ["system", "model", "outputs", "load", *FIGURES.values(), "least mean E2E", ""]
        rows = [
            [
                system,
                cell.model,
                cell.outputs,
                f"{cell.load:g}",
                *(f"{mean(ratios(found, cell, system, figure)):.2f}" for figure in FIGURES),
                ", ".join(_best_layouts(found, cell)),
                "ahead" if is_ahead(found, cell, system) else "",
            ]
            for cell in CELLS
        ]
        lines += markdown(headings, rows)
    return lines


def _best_layouts(found: Kept, cell: Cell) -> list[str]:
    runs = [one[cell.model][cell.name] for one in found.seeds]
    return sorted({best(run, cell.model, "mean_e2e_s")[1] for run in runs})


PARTS = {
    "engine": "one engine",
    "tensor": "tensor parallel, all",
    "token": "tokens split, all",
    "weights": "weights",
    "attention": "attention",
    "all_to_all": "all-to-alls",
    "coordination": "coordination",
    "pull": "pull of KV",
    "engine_decode": "decode, one engine",
    "tensor_decode": "decode, tensor parallel",
}
"""Columns of the table of one prompt, in ms."""


def _prompts(found: Kept) -> list[str]:
    """The time of one prompt and of one token, without any load."""
    rows = [
        [model, str(parts["engines"]), *(f"{parts[key]:.3g}" for key in PARTS)]
        for model in MODELS
        for parts in [found.seeds[0][model]["prompt"]]
    ]
    return [
        "## One prompt alone",
        "",
        *paragraph(template("token_split_prompt", tokens=f"{SHOWN_PROMPT:,}")),
        *markdown(["model", "engines", *PARTS.values()], rows),
    ]


def _rows(found: Kept) -> list[str]:
    """Every figure of every run, in ms, by model and outputs."""
    lines = ["## Every row", "", *paragraph(template("token_split_rows", seeds=len(found.seeds)))]
    for model in MODELS:
        for outputs in OUTPUTS:
            capacities = [one[model]["capacity_rps"][outputs] for one in found.seeds]
            cells = [cell for cell in CELLS if (cell.model, cell.outputs) == (model, outputs)]
            lines += [
                f"### {model}, {outputs} outputs",
                "",
                f"Capacity of `static-dp`: {spread(capacities)} requests/s.",
                "",
                *markdown(
                    ["load", "system", *(f"{title} (ms)" for title in FIGURES.values())],
                    [
                        [f"{cell.load:g}", name, *_figures(found, cell, name)]
                        for cell in cells
                        for name in (*fixed_systems(model), *LANES)
                    ],
                ),
            ]
    return lines


def _figures(found: Kept, cell: Cell, name: str) -> list[str]:
    runs = [one[cell.model][cell.name][name] for one in found.seeds]
    return [spread([run[figure] * MILLISECONDS for run in runs]) for figure in FIGURES]
