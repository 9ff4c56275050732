"""Flying Serving, figures 8 and 9: TTFT over time under bursts; time per token and peak
throughput.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.common import (
    BURST_S,
    LOW_S,
    MAX_NUM_SEQS,
    MODELS,
    PAPER,
    RESULTS,
    UTILIZATION,
    Kept,
    Numbers,
    Setting,
    calibrated,
    low_run,
    peak_tokens_per_s,
    run,
    system,
    template,
)
from experiments.reasons import why
from experiments.rows import (
    Known,
    Row,
    markdown,
    one_layout,
    page,
    paragraph,
    row,
    spread,
    table,
    write,
)
from flying_lab.bench.report.page import pictures
from flying_lab.cli.simulation import measured

SYSTEMS = ("auto", "static-dp", "static-tp", "shift-parallel", "fork")
GROUPED = one_layout(
    "`auto` serves low load with the widest group. In the model its steps cost static TP's time "
    "plus measured "
    "coordination. With other coefficients, or eager, it may choose another layout"
)
APART = one_layout(
    "at their peak and in bursts `auto` serves GPT-OSS-120B and Nemotron-8B apart; such steps "
    "are static DP's in the "
    "model, and what lanes were measured to cost, so the ratio is that of two fixed layouts"
)
TITLES = {
    "fig8": "Flying Serving, figure 8: TTFT under bursts",
    "fig9": "Flying Serving, figure 9: time per token and peak throughput",
}


def measure(setting: Setting) -> Numbers:
    """Times, peaks and switches of each system, by model."""
    return {model: _measure(model, setting) for model in MODELS}


def _measure(model: str, setting: Setting) -> Numbers:
    faster, workload = calibrated(model, setting)
    runs = [run(system(name, model, setting), model, workload) for name in SYSTEMS]
    if setting.draws:
        paths = {
            "over_time": RESULTS / f"fig8_{model}.png",
            "distributions": RESULTS / f"fig9_{model}.png",
        }
        pictures([measured(one) for one in runs], paths)
    return {"faster": faster, **{one.system.name: figures_of(one, model, setting) for one in runs}}


def figures_of(one: Any, model: str, setting: Setting) -> dict[str, float]:
    """Times, peak and switches of the run of one system."""
    burst = one.summary["phases"]["burst"]
    low = low_run(one.system.name, model, setting).summary
    return {
        "burst_mean_ttft_s": burst["mean_ttft_ms"] / 1e3,
        "burst_p90_ttft_s": burst["p90_ttft_ms"] / 1e3,
        "low_mean_ttft_ms": low["mean_ttft_ms"],
        "low_median_tpot_ms": low["median_tpot_ms"],
        "median_tpot_ms": one.summary["median_tpot_ms"],
        "mean_e2e_s": one.summary["mean_e2el_ms"] / 1e3,
        "switches": len(one.outcome.switches),
        "peak_tokens_per_s": peak_tokens_per_s(one.system.name, model, setting),
    }


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write both; what they compare."""
    return _fig8(found, folder) + _fig9(found, folder)


def _ratio(model: str, key: str, top: str, bottom: str) -> Callable[[Numbers], float]:
    return lambda one: one[model][top][key] / one[model][bottom][key]


def _fig8(found: Kept, folder: Path) -> list[Row]:
    lines, compared = [*paragraph(template("fig8")), *_setting(found)], []
    for model in MODELS:
        rows = why("fig8", model, _ttft_rows(model, found))
        compared += [one.of(model) for one in rows]
        lines += [f"## {model}", "", *table(rows)]
        headings = [
            "burst mean TTFT (s)",
            "burst P90 TTFT (s)",
            "low load mean TTFT (ms)",
            "mean E2E (s)",
            "switches",
        ]
        keys = [
            "burst_mean_ttft_s",
            "burst_p90_ttft_s",
            "low_mean_ttft_ms",
            "mean_e2e_s",
            "switches",
        ]
        lines += _systems(model, found, headings, keys)
        lines += [f"![P90 TTFT over time](fig8_{model}.png)", ""]
    rows = why("fig8", "all", [_shift_row(found)])
    compared += rows
    lines += ["## Shift Parallelism at low load", "", *table(rows)]
    write(folder, "fig8", _page(TITLES["fig8"], found, lines))
    return compared


def _ttft_rows(model: str, found: Kept) -> list[Row]:
    paper, apart = PAPER[model], _apart(model)
    mean, p90, low = "burst_mean_ttft_s", "burst_p90_ttft_s", "low_mean_ttft_ms"
    specs: list[tuple[str, str, tuple[str, str, str], bool, Known | None]] = [
        ("burst, mean TTFT", "burst_flying_over_dp_ttft", (mean, "auto", "static-dp"), False, None),
        (
            "burst, P90 TTFT",
            "burst_tp_over_flying_p90_ttft",
            (p90, "static-tp", "auto"),
            True,
            apart,
        ),
        (
            "burst, P90 TTFT",
            "burst_shift_over_flying_p90_ttft",
            (p90, "shift-parallel", "auto"),
            True,
            apart,
        ),
        (
            "low load, mean TTFT",
            "low_flying_over_tp_ttft",
            (low, "auto", "static-tp"),
            False,
            GROUPED,
        ),
    ]
    return [
        row(
            f"{what}, {ratio[1]} / {ratio[2]}",
            paper[key],
            found,
            _ratio(model, *ratio),
            higher,
            known,
        )
        for what, key, ratio, higher, known in specs
    ]


def _apart(model: str) -> Known | None:
    """What is known of a model that `auto` serves apart in bursts and at its peak."""
    return APART if model != "llama-3-70b" else None


def _shift_row(found: Kept) -> Row:
    """The paper has one number, "up to", for the models that Shift Parallelism can run."""
    ratios = [
        _ratio(model, "low_mean_ttft_ms", "auto", "shift-parallel")
        for model in ("llama-3-70b", "nemotron-8b")
    ]
    name = "low load, mean TTFT, auto / shift-parallel, the larger of Llama's and Nemotron's"
    paper = PAPER["low_flying_over_shift_ttft"]
    return row(name, paper, found, lambda one: max(of(one) for of in ratios), False, GROUPED)


def _fig9(found: Kept, folder: Path) -> list[Row]:
    lines, compared = _setting(found), []
    for model in MODELS:
        paper = PAPER[model]
        tpot = _ratio(model, "median_tpot_ms", "static-dp", "auto")
        rows = [
            row(
                "median TPOT, static-dp / auto",
                paper["dp_over_flying_median_tpot"],
                found,
                tpot,
                True,
            )
        ]
        for other, key in (("static-dp", "dp"), ("static-tp", "tp"), ("shift-parallel", "shift")):
            peak, published = (
                _ratio(model, "peak_tokens_per_s", "auto", other),
                paper[f"peak_flying_over_{key}"],
            )
            rows.append(
                row(f"peak tokens/s, auto / {other}", published, found, peak, True, _apart(model))
            )
        rows = why("fig9", model, rows)
        compared += [one.of(model) for one in rows]
        lines += [f"## {model}", "", *table(rows)]
        headings = ["median TPOT (ms)", "low load median TPOT (ms)", "peak tokens/s"]
        lines += _systems(
            model, found, headings, ["median_tpot_ms", "low_median_tpot_ms", "peak_tokens_per_s"]
        )
        lines += [f"![distributions](fig9_{model}.png)", ""]
    write(folder, "fig9", _page(TITLES["fig9"], found, lines))
    return compared


def _systems(model: str, found: Kept, headings: list[str], keys: list[str]) -> list[str]:
    cells = [
        [name, *(spread([one[model][name][key] for one in found.seeds]) for key in keys)]
        for name in SYSTEMS
    ]
    return markdown(["system", *headings], cells)


def _page(title: str, found: Kept, lines: list[str]) -> str:
    return page(title, {"fig8_fig9": found}, lines, ("simulated", "gpt_oss"))


def _setting(found: Kept) -> list[str]:
    faster = ", ".join(
        f"{model} {spread([one[model]['faster'] for one in found.seeds])}" for model in MODELS
    )
    given = {
        "max_num_seqs": MAX_NUM_SEQS,
        "utilization": UTILIZATION,
        "low_s": f"{LOW_S:g}",
        "burst_s": f"{BURST_S:g}",
    }
    return paragraph(template("fig8_fig9", faster=faster, seeds=len(found.seeds), **given))
