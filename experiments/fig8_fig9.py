"""Flying Serving, figures 8 and 9: TTFT over time under bursts; time per token and peak throughput."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.common import (
    BURST_S,
    LOW_S,
    MODELS,
    PAPER,
    RESULTS,
    SLOTS,
    UTILIZATION,
    Row,
    burst_run,
    calibrated,
    low_run,
    markdown,
    number,
    peak_tokens_per_s,
    seconds,
    table,
    write,
)
from experiments.reasons import why
from flying_serving.sim.figures import distributions, over_time

SYSTEMS = ("auto", "static-dp", "static-tp", "shift-parallel", "fork")


def fig8() -> list[Row]:
    """P90 TTFT over time, with the layout."""
    lines, compared = _setting(), []
    for model in MODELS:
        paper, runs = PAPER[model], [burst_run(name, model) for name in SYSTEMS]
        mean = {one.system.name: seconds(one.summary, "burst", "mean_ttft_ms") for one in runs}
        p90 = {one.system.name: seconds(one.summary, "burst", "p90_ttft_ms") for one in runs}
        low = {name: low_run(name, model).summary["mean_ttft_ms"] for name in SYSTEMS}
        rows = [
            Row(f"{what}, {top} / {bottom}", paper[key], times[top] / times[bottom], higher)
            for what, key, times, top, bottom, higher in (
                ("burst, mean TTFT", "burst_flying_over_dp_ttft", mean, "auto", "static-dp", False),
                ("burst, P90 TTFT", "burst_tp_over_flying_p90_ttft", p90, "static-tp", "auto", True),
                ("burst, P90 TTFT", "burst_shift_over_flying_p90_ttft", p90, "shift-parallel", "auto", True),
                ("low load, mean TTFT", "low_flying_over_tp_ttft", low, "auto", "static-tp", False),
            )
        ]
        rows = why("fig8", model, rows)
        compared += [row.of(model) for row in rows]
        lines += [f"## {model}", "", *table(rows)]
        shown = []
        for one in runs:
            name, e2e = one.system.name, one.summary["mean_e2el_ms"] / 1e3
            times = [number(value) for value in (mean[name], p90[name], low[name], e2e)]
            shown.append([name, *times, str(len(one.outcome.switches))])
        headings = ["burst mean TTFT (s)", "burst P90 TTFT (s)", "low load mean TTFT (ms)", "mean E2E (s)", "switches"]
        lines += markdown(["system", *headings], shown)
        over_time(runs, RESULTS / f"fig8_{model}.png")
        lines += [f"![P90 TTFT over time](fig8_{model}.png)", ""]
    write("fig8", "Flying Serving, figure 8: TTFT under bursts", lines)
    return compared


def fig9() -> list[Row]:
    """Median TPOT and peak throughput."""
    lines, compared = _setting(), []
    for model in MODELS:
        paper, runs = PAPER[model], [burst_run(name, model) for name in SYSTEMS]
        tpot = {one.system.name: one.summary["median_tpot_ms"] for one in runs}
        peak = {name: peak_tokens_per_s(name, model) for name in SYSTEMS}
        rows = [
            Row("median TPOT, static-dp / auto", paper["dp_over_flying_median_tpot"], _ratio(tpot, "static-dp"), True)
        ]
        for other, key in (("static-dp", "dp"), ("static-tp", "tp"), ("shift-parallel", "shift")):
            rows.append(
                Row(f"peak tokens/s, auto / {other}", paper[f"peak_flying_over_{key}"], 1 / _ratio(peak, other), True)
            )
        rows = why("fig9", model, rows)
        compared += [row.of(model) for row in rows]
        lines += [f"## {model}", "", *table(rows)]
        headings = ["system", "median TPOT (ms)", "low load median TPOT (ms)", "peak tokens/s"]
        low = {name: low_run(name, model).summary["median_tpot_ms"] for name in SYSTEMS}
        lines += markdown(headings, [[name, *(number(of[name]) for of in (tpot, low, peak))] for name in SYSTEMS])
        distributions(runs, RESULTS / f"fig9_{model}.png")
        lines += [f"![distributions](fig9_{model}.png)", ""]
    write("fig9", "Flying Serving, figure 9: time per token and peak throughput", lines)
    return compared


def _ratio(values: Mapping[str, float], other: str) -> float:
    return values[other] / values["auto"]


def main() -> list[Row]:
    """Both, from the same runs."""
    return fig8() + fig9()


def _setting() -> list[str]:
    faster = ", ".join(f"{model} {calibrated(model)[0]:g}" for model in MODELS)
    return [
        f"The paper's generator on 8 H200s, {SLOTS} requests and 8,192 tokens per step of an engine,",
        f"`gpu_memory_utilization` {UTILIZATION}, {LOW_S:g} s of low load and bursts of {BURST_S:g} s: what the paper",
        "does not state is chosen as [simulator.md](../simulator.md) says. Rates of bursts are multiplied until static",
        f"DP's mean TTFT in bursts is the paper's: {faster}. Llama gets 4,000 requests, the others, whose bursts are",
        "denser, 8,000. Low load is 600 requests at 3.5 per second. Peak is the steady middle of 2,000 requests that",
        "come at once.",
        "",
    ]
