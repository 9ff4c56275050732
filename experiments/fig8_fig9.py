"""Flying Serving, figures 8 and 9: TTFT over time under bursts; time per token and peak
throughput.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

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
    run,
    template,
)
from experiments.paper_rows import AUTO, NOTICE, Value, compared, systems_tables, systems_text
from experiments.paper_runs import (
    PRODUCT,
    calibrated,
    key,
    limits,
    low_run,
    peak_tokens_per_s,
    systems,
)
from experiments.reasons import why
from experiments.rows import (
    Known,
    Row,
    late_dispatch,
    one_layout,
    page,
    paragraph,
    row,
    spread,
    table,
    write,
)
from experiments.servers import MAX_TOKENS
from flying_lab.bench.report.page import pictures
from flying_lab.cli.simulation import Simulated, measured

DRAWN = ("auto", PRODUCT, "stock-dp", "stock-tp", "shift-parallel", "fork")
FIG8_COLUMNS = {
    "burst_mean_ttft_s": "burst mean TTFT (s)",
    "burst_p90_ttft_s": "burst P90 TTFT (s)",
    "burst_mean_queue_s": "burst mean queue time (s)",
    "burst_p90_queue_s": "burst P90 queue time (s)",
    "low_mean_ttft_ms": "low load mean TTFT (ms)",
    "mean_e2e_s": "mean E2E (s)",
    "switches": "switches",
}
FIG9_COLUMNS = {
    "median_tpot_ms": "median TPOT (ms)",
    "low_median_tpot_ms": "low load median TPOT (ms)",
    "peak_tokens_per_s": "peak tokens/s",
}
GROUPED = one_layout(
    "`auto` serves low load with the widest group. In the model its steps cost stock TP's time, "
    "or less where they divide tokens. With other coefficients, or eager, it may choose another "
    "layout"
)
APART = one_layout(
    "at their peak and in bursts `auto` serves GPT-OSS-120B and Nemotron-8B apart; such steps "
    "are stock DP's in the model, so the ratio is that of two fixed layouts"
)
LATE = late_dispatch(
    "our server and the fork keep requests in one queue until an engine has room, and stock's "
    "router places them as they come. Both forks of the table are eager and have the same peak, "
    "and at the peak all are apart"
)
TITLES = {
    "fig8": "Flying Serving, figure 8: TTFT under bursts",
    "fig9": "Flying Serving, figure 9: time per token and peak throughput",
}


def measure(setting: Setting) -> Numbers:
    """The rates of bursts, and figures of each system by `max_num_seqs`, by model."""
    return {model: _measure(model, setting) for model in MODELS}


def _measure(model: str, setting: Setting) -> Numbers:
    faster, workload = calibrated(model, setting)
    found: Numbers = {"faster": faster, "max_tokens": MAX_TOKENS}
    drawn = []
    for limit in limits(setting):
        figures = found[key(limit)] = {}
        for one in systems(model, setting, limit):
            done = run(one, model, workload)
            figures[one.name] = figures_of(done, model, setting.seed)
            if setting.draws and limit == MAX_NUM_SEQS and one.name in DRAWN:
                drawn.append(measured(done))
    if drawn:
        paths = {
            "over_time": RESULTS / f"fig8_{model}.png",
            "distributions": RESULTS / f"fig9_{model}.png",
        }
        pictures(drawn, paths)
    return found


def figures_of(done: Simulated, model: str, seed: int) -> dict[str, float]:
    """Times, peak and switches of the run of one system."""
    burst = done.summary["phases"]["burst"]
    low = low_run(done.system, model, seed).summary
    return {
        "burst_mean_ttft_s": burst["mean_ttft_ms"] / 1e3,
        "burst_p90_ttft_s": burst["p90_ttft_ms"] / 1e3,
        "burst_mean_queue_s": burst["mean_queue_time_ms"] / 1e3,
        "burst_p90_queue_s": burst["p90_queue_time_ms"] / 1e3,
        "low_mean_ttft_ms": low["mean_ttft_ms"],
        "low_median_tpot_ms": low["median_tpot_ms"],
        "median_tpot_ms": done.summary["median_tpot_ms"],
        "mean_e2e_s": done.summary["mean_e2el_ms"] / 1e3,
        "switches": len(done.outcome.switches),
        "peak_tokens_per_s": peak_tokens_per_s(done.system, model, seed),
    }


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write both; what they compare."""
    return _fig8(found, folder) + _fig9(found, folder)


def _ratio(model: str, figure: str, top: str, bottom: str) -> Value:
    """The ratio of two systems; `auto` stands for our system, by the name that it has there."""

    def value(one: Numbers, ours: str, limit: str) -> float:
        there = one[model][limit]
        high, low = (there[ours if name == AUTO else name][figure] for name in (top, bottom))
        return float(high / low)

    return value


def _fig8(found: Kept, folder: Path) -> list[Row]:
    lines, rows_of_all = [*paragraph(template("fig8")), *_setting(found)], []
    for model in MODELS:
        rows = why("fig8", model, _ttft_rows(model, found))
        rows_of_all += [one.of(model) for one in rows]
        lines += [f"## {model}", "", *table(rows), *_systems(model, found, FIG8_COLUMNS)]
        lines += [f"![P90 TTFT over time](fig8_{model}.png)", ""]
    rows = why("fig8", "all", [_shift_row(found)])
    rows_of_all += rows
    lines += ["## Shift Parallelism at low load", "", *table(rows)]
    write(folder, "fig8", _page(TITLES["fig8"], found, lines))
    return rows_of_all


def _ttft_rows(model: str, found: Kept) -> list[Row]:
    paper, apart = PAPER[model], _apart(model)
    mean, p90, low = "burst_mean_ttft_s", "burst_p90_ttft_s", "low_mean_ttft_ms"
    specs: list[tuple[str, str, tuple[str, str, str], bool, Known | None]] = [
        ("burst, mean TTFT", "burst_flying_over_dp_ttft", (mean, "auto", "stock-dp"), False, None),
        (
            "burst, P90 TTFT",
            "burst_tp_over_flying_p90_ttft",
            (p90, "stock-tp", "auto"),
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
            (low, "auto", "stock-tp"),
            False,
            GROUPED,
        ),
    ]
    return [
        compared(
            partial(_row, f"{what}, {ratio[1]} / {ratio[2]}", paper[named], found, higher, known),
            found,
            _ratio(model, *ratio),
        )
        for what, named, ratio, higher, known in specs
    ]


def _row(
    name: str,
    paper: float | None,
    found: Kept,
    higher: bool,
    known: Known | None,
    of: Callable[[Numbers], float],
) -> Row:
    return row(name, paper, found, of, higher, known)


def _apart(model: str) -> Known | None:
    """What is known of a model that `auto` serves apart in bursts and at its peak."""
    return APART if model != "llama-3-70b" else None


def _shift_row(found: Kept) -> Row:
    """The paper has one number, "up to", for the models that Shift Parallelism can run."""
    ratios = [
        _ratio(model, "low_mean_ttft_ms", AUTO, "shift-parallel")
        for model in ("llama-3-70b", "nemotron-8b")
    ]

    def larger(one: Numbers, ours: str, limit: str) -> float:
        return max(ratio(one, ours, limit) for ratio in ratios)

    name = "low load, mean TTFT, auto / shift-parallel, the larger of Llama's and Nemotron's"
    paper = PAPER["low_flying_over_shift_ttft"]
    return compared(partial(_row, name, paper, found, False, GROUPED), found, larger)


def _fig9(found: Kept, folder: Path) -> list[Row]:
    lines, rows_of_all = _setting(found), []
    for model in MODELS:
        rows = why("fig9", model, _token_rows(model, found))
        rows_of_all += [one.of(model) for one in rows]
        lines += [f"## {model}", "", *table(rows), *_systems(model, found, FIG9_COLUMNS)]
        lines += [f"![distributions](fig9_{model}.png)", ""]
    write(folder, "fig9", _page(TITLES["fig9"], found, lines))
    return rows_of_all


def _token_rows(model: str, found: Kept) -> list[Row]:
    """Time per token, and peaks."""
    paper, name = PAPER[model], "median TPOT, stock-dp / auto"
    tpot = partial(_row, name, paper["dp_over_flying_median_tpot"], found, True, None)
    rows = [compared(tpot, found, _ratio(model, "median_tpot_ms", "stock-dp", AUTO))]
    for other, short in (("stock-dp", "dp"), ("stock-tp", "tp"), ("shift-parallel", "shift")):
        name, published = f"peak tokens/s, auto / {other}", paper[f"peak_flying_over_{short}"]
        known = _apart(model) or (LATE if other == "stock-dp" else None)
        peak = partial(_row, name, published, found, True, known)
        rows.append(compared(peak, found, _ratio(model, "peak_tokens_per_s", AUTO, other)))
    return rows


def _systems(model: str, found: Kept, columns: dict[str, str]) -> list[str]:
    return systems_tables(model, [one[model] for one in found.seeds], columns)


def _page(title: str, found: Kept, lines: list[str]) -> str:
    return page(title, {"fig8_fig9": found}, lines, (NOTICE, "gpt_oss"))


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
    text = template("fig8_fig9", faster=faster, seeds=len(found.seeds), **given)
    return [*paragraph(text), *systems_text()]
