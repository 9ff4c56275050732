"""What would be ahead of every layout: prompts split by tokens over all engines, outputs apart."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from experiments import token_split_runs
from experiments.common import MAX_NUM_SEQS, MODELS, Kept, Numbers, Setting, template
from experiments.rows import Row, markdown, number, page, paragraph, spread, write
from experiments.token_split_runs import (
    CELLS,
    FIGURES,
    LANES,
    LOADS,
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
    runs = _runs(found, cell)
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
    lines = [*_verdict(found), *_ratios(found), *_prompts(found), *_rows(found)]
    title = "Prompts split by tokens, outputs apart: an upper bound"
    notices = ("simulated", "gpt_oss")
    write(folder, "token_split", page(title, {"token_split": found}, lines, notices))
    return []


def _verdict(found: Kept) -> list[str]:
    """Say whether the lane is worth building, and what bounds it."""
    lane = {
        figure: _range(found, "token-split", f"mean_{figure}_s")
        for figure in ("ttft", "tpot", "e2e")
    }
    verdict = template(
        "token_split_verdict",
        worth="worth building" if is_worth_building(found) else "not worth building",
        ahead=_all_ahead(found, "token-split"),
        cells=len(CELLS),
        **lane,
        ahead_large=_all_ahead(found, "token-split-large"),
        e2e_large=_range(found, "token-split-large", "mean_e2e_s"),
        ahead_fused=_all_ahead(found, "token-split-fused"),
        ahead_fused_large=_all_ahead(found, "token-split-fused-large"),
        e2e_fused_large=_range(found, "token-split-fused-large", "mean_e2e_s"),
    )
    reasons = [template(f"token_split_{name}", **values) for name, values in _bounds(found).items()]
    shift = sum(_best_layouts(found, cell) == ["shift-parallel"] for cell in CELLS)
    instead = template("token_split_shift", best=shift, cells=len(CELLS), **_over_stock(found))
    listed = [line for one in reasons for line in _item(one)]
    beside = template("token_split_beside_dp", cells=len(CELLS), **_beside_dp(found))
    lines = ["## Verdict", "", *paragraph(verdict), *paragraph(beside)]
    return [*lines, "What bounds it:", "", *listed, "", *paragraph(instead)]


def _beside_dp(found: Kept) -> dict[str, object]:
    """Static data parallelism's figures, and the cells in which the lane beats stock layouts."""
    cells = [cell for cell in CELLS if (cell.outputs, cell.load) == ("long", LOADS[0])]
    stock = [
        cell
        for cell in CELLS
        if all(
            run["token-split"]["mean_e2e_s"]
            <= AHEAD * min(run[layout]["mean_e2e_s"] for layout in fixed_systems(cell.model)[:-1])
            for run in _runs(found, cell)
        )
    ]
    return {
        "ttft": ", ".join(_over_dp(found, cell, "mean_ttft_s") for cell in cells),
        "tpot": ", ".join(_over_dp(found, cell, "mean_tpot_s") for cell in cells),
        "ahead_stock": len(stock),
    }


def _over_dp(found: Kept, cell: Cell, figure: str) -> str:
    values = [run["token-split"][figure] / run["stock-dp"][figure] for run in _runs(found, cell)]
    return f"{mean(values):.2f} ({cell.model})"


def _runs(found: Kept, cell: Cell) -> list[Numbers]:
    """The numbers of a cell, for each seed."""
    return [one[cell.model][cell.name] for one in found.seeds]


def _item(text: str) -> list[str]:
    first, *rest = paragraph(text)[:-1]
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _all_ahead(found: Kept, system: str) -> int:
    return sum(cells_ahead(found, model, system) for model in MODELS)


def _range(found: Kept, system: str, figure: str, load: float | None = None) -> str:
    """The least and the largest ratio to the best fixed layout of all cells, of one load if
    given.
    """
    cells = [cell for cell in CELLS if load in (None, cell.load)]
    values = [mean(ratios(found, cell, system, figure)) for cell in cells]
    return f"{number(min(values))} to {number(max(values))}"


def _bounds(found: Kept) -> dict[str, dict[str, str]]:
    """By reason, the values of its sentence."""
    prompts = {model: found.seeds[0][model]["prompt"] for model in MODELS}
    shares = {
        key: [parts[key] / parts["token"] for parts in prompts.values()]
        for key in ("all_to_all", "pull")
    }
    return {
        "apart": {
            "ahead": f"{_all_ahead(found, 'free-prompts')} of {len(CELLS)}",
            **{
                f"at_{number_}": _range(found, "free-prompts", "mean_e2e_s", load)
                for number_, load in zip(("low", "middle", "high"), LOADS, strict=True)
            },
        },
        "weights": {
            "tokens": f"{SHOWN_PROMPT:,}",
            "split": _device_times(prompts, "token"),
            "tensor": _device_times(prompts, "tensor"),
        },
        "waiting": {"over": _fused_over_woven(found)},
        "links": {key: f"{100 * max(values):.0f} %" for key, values in shares.items()},
    }


def _device_times(prompts: dict[str, Numbers], lane: str) -> str:
    """A prompt's device time in a lane over that in one engine, by model."""
    return ", ".join(
        f"{parts['engines'] * parts[lane] / parts['engine']:.2f} ({model})"
        for model, parts in prompts.items()
    )


def _fused_over_woven(found: Kept) -> str:
    """Mean E2E of the fused form over the woven one's, with large steps: the least and largest."""
    values = [
        mean(
            run["token-split-fused-large"]["mean_e2e_s"] / run["token-split-large"]["mean_e2e_s"]
            for run in _runs(found, cell)
        )
        for cell in CELLS
    ]
    return f"{number(min(values))} to {number(max(values))}"


def _over_stock(found: Kept) -> dict[str, str]:
    """Shift Parallelism's mean E2E over the best tensor or data parallel layout's, by load."""
    over = {}
    for name, load in zip(("low", "middle", "high"), LOADS, strict=True):
        values = []
        for cell in [cell for cell in CELLS if cell.load == load]:
            stock = fixed_systems(cell.model)[:-1]
            values.append(
                mean(
                    run["shift-parallel"]["mean_e2e_s"]
                    / min(run[layout]["mean_e2e_s"] for layout in stock)
                    for run in _runs(found, cell)
                )
            )
        over[f"over_{name}"] = f"{number(min(values))} to {number(max(values))}"
    return over


def _ratios(found: Kept) -> list[str]:
    """The lane in every figure, and every form in two of them."""
    lines = ["## Beside the best fixed layout", "", *paragraph(template("token_split_ratios"))]
    headings = ["model", "outputs", "load"]
    lines += markdown(
        [*headings, *FIGURES.values(), "least mean E2E", "ahead"],
        [
            [
                *_cell(cell),
                *(_ratio(found, cell, "token-split", figure) for figure in FIGURES),
                ", ".join(_best_layouts(found, cell)),
                "yes" if is_ahead(found, cell, "token-split") else "no",
            ]
            for cell in CELLS
        ],
    )
    for figure in ("mean_e2e_s", "mean_ttft_s"):
        lines += [
            f"### {FIGURES[figure]} of every form",
            "",
            *markdown(
                [*headings, *LANES],
                [
                    [*_cell(cell), *(_ratio(found, cell, system, figure) for system in LANES)]
                    for cell in CELLS
                ],
            ),
        ]
    return lines


def _cell(cell: Cell) -> list[str]:
    return [cell.model, cell.outputs, f"{cell.load:g}"]


def _ratio(found: Kept, cell: Cell, system: str, figure: str) -> str:
    return number(mean(ratios(found, cell, system, figure)))


def _best_layouts(found: Kept, cell: Cell) -> list[str]:
    return sorted({best(run, cell.model, "mean_e2e_s")[1] for run in _runs(found, cell)})


PARTS = {
    "engine": "one engine",
    "tensor": "tensor parallel, all",
    "token": "tokens split, all",
    "weights": "weights",
    "attention": "attention",
    "all_to_all": "all-to-alls",
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
    lines = [
        "## Every row",
        "",
        *paragraph(template("token_split_rows", seeds=len(found.seeds), seqs=MAX_NUM_SEQS)),
    ]
    for model in MODELS:
        for outputs in OUTPUTS:
            capacities = [one[model]["capacity_rps"][outputs] for one in found.seeds]
            cells = [cell for cell in CELLS if (cell.model, cell.outputs) == (model, outputs)]
            lines += [
                f"### {model}, {outputs} outputs",
                "",
                f"Capacity of `stock-dp`: {spread(capacities)} requests/s.",
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
    runs = [run[name] for run in _runs(found, cell)]
    return [spread([run[figure] * MILLISECONDS for run in runs]) for figure in FIGURES]
