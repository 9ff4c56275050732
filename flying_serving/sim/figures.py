"""Figures of simulated runs. matplotlib's object interface only, so that nothing is opened and nothing is global."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from flying_serving.results.metrics import tpot_s, ttft_s
from flying_serving.results.results import Floats
from flying_serving.results.timeline import concurrency, tokens_per_s
from flying_serving.sim.run import Simulated

BINS = 60
SHADES = {1: "#c6dbef", 2: "#9ecae1", 4: "#6baed6", 8: "#3182bd"}


def over_time(runs: Sequence[Simulated], path: Path) -> None:
    """P90 TTFT and tokens per second over time, and below the degree of each device of systems that change it."""
    changing = [one for one in runs if one.outcome.switches]
    heights = [3, 2, *([0.7] * len(changing))]
    figure = Figure(figsize=(10, 2 + sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights}, squeeze=False)[:, 0]
    for one in runs:
        axes[0].plot(*p90_over_time(one.results.floats("arrival_s"), ttft_s(one.results)), label=one.system.name)
        rates = tokens_per_s(one.results, 5.0) / 5.0
        axes[1].plot(np.arange(len(rates)) * 5.0, rates, label=one.system.name)
    axes[0].set(ylabel="P90 TTFT (s)", yscale="log")
    axes[1].set(ylabel="tokens/s")
    axes[0].legend(fontsize="small", ncols=6, loc="lower left", bbox_to_anchor=(0, 1))
    for axis, one in zip(axes[2:], changing, strict=True):
        layout_band(axis, one)
    axes[-1].set(xlabel="time (s)")
    figure.savefig(path, dpi=110)


def p90_over_time(arrivals_s: Floats, values: Floats) -> tuple[Floats, Floats]:
    """The 90th percentile of requests that arrived in each of BINS equal times; NaN where none did."""
    edges = np.linspace(0.0, float(arrivals_s.max(initial=1.0)) + 1e-9, BINS + 1)
    bins = np.digitize(arrivals_s, edges) - 1
    found = [values[(bins == b) & ~np.isnan(values)] for b in range(BINS)]
    heights = [float(np.percentile(v, 90)) if len(v) else float("nan") for v in found]
    return (edges[:-1] + edges[1:]) / 2, np.asarray(heights)


def layout_band(axis: Any, one: Simulated) -> None:
    """The degree of each engine over time: a row for each engine."""
    degree_of = one.system.settings.capacity.degree
    layouts = [(max(0.0, at_s), layout) for at_s, layout in one.outcome.layouts]
    end_s = one.results.run.duration_s
    ends = [at_s for at_s, _ in layouts[1:]] + [end_s]
    for (begin_s, layout), until_s in zip(layouts, ends, strict=True):
        for group in layout.groups:
            degree = degree_of(len(group))
            colour = SHADES.get(degree, "#08519c")
            axis.broken_barh([(begin_s, until_s - begin_s)], (group[0], len(group)), color=colour, edgecolor="white")
    axis.set(ylabel=f"{one.system.name}\nengine", ylim=(0, one.system.shape.engines))
    for degree in one.system.settings.capacity.degrees:
        axis.plot([], [], color=SHADES.get(degree, "#08519c"), linewidth=6, label=f"degree {degree}")
    axis.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))


def distributions(runs: Sequence[Simulated], path: Path) -> None:
    """Cumulative distributions of TTFT and TPOT, and requests at a time."""
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    first, each, crowd = figure.subplots(1, 3)
    for one in runs:
        for axis, values in ((first, ttft_s(one.results)), (each, tpot_s(one.results))):
            known = np.sort(values[~np.isnan(values)])
            axis.plot(known, np.linspace(0, 1, len(known)), label=one.system.name)
        crowd.step(*concurrency(one.results), where="post", label=one.system.name)
    first.set(xlabel="TTFT (s)", ylabel="share of requests", xscale="log")
    each.set(xlabel="TPOT (s)", xscale="log")
    crowd.set(xlabel="time (s)", ylabel="requests at a time")
    first.legend(fontsize="x-small")
    figure.savefig(path, dpi=110)
