"""Figures of systems that replayed the same workload: pure functions of their results and logs of
switches.

matplotlib's object interface only, so nothing is opened and nothing is global.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from flying_lab.bench.report import series
from flying_lab.bench.report.bands import band
from flying_lab.bench.report.load import MeasuredSystem
from flying_lab.bench.report.style import (
    FAINT,
    INK,
    LABEL_SHARE,
    SHADE,
    WIDTH_IN,
    line,
    scale,
    styled,
)
from flying_lab.results.metrics import e2el_s, queue_s, tpot_s, ttft_s
from flying_lab.results.results import Floats, Results
from flying_lab.results.timeline import concurrency, stretches, tokens_per_s

SHORTEST_S = 1e-4
"""Shorter times are drawn as this one: a log scale has no place for a queue that is empty."""


@styled
def over_time(systems: Sequence[MeasuredSystem]) -> Figure:
    """Draw requests at a time, P90 TTFT, queue time and tokens/s over time; below, each changing
    layout as a coloured band.

    After Fig. 8 of the Flying Serving paper (arXiv 2602.22593).
    """
    queued = any(not np.isnan(queue_s(one.results)).all() for one in systems)
    banded = [one for one in systems if one.switches] or [one for one in systems if one.spans]
    curves = 4 if queued else 3
    heights = [1.5] * curves + [
        0.34 + 0.13 * one.log.engines for one in banded if one.log is not None
    ]
    figure = Figure(
        figsize=(WIDTH_IN, 1.0 + sum(heights) + 0.1 * len(heights)), layout="constrained"
    )
    axes = figure.subplots(
        len(heights), 1, sharex=True, gridspec_kw={"height_ratios": heights}, squeeze=False
    )[:, 0]
    duration_s = max(one.results.run.duration_s for one in systems)
    width_s = series.window_s(duration_s)
    _phases(list(axes[:curves]), systems[0].results)
    for place, one in enumerate(systems):
        axes[0].step(
            *series.thinned(*concurrency(one.results)), where="post", label=one.name, **line(place)
        )
    window = f"of requests sent within {width_s:g} s"
    axes[0].set(ylabel="requests", ylim=(0, None))
    axes[0].set_title("Requests at a time", pad=14)
    _percentile(axes[1], systems, ttft_s, width_s, f"P90 time to first token, {window}")
    if queued:
        _percentile(axes[2], systems, queue_s, width_s, f"P90 time in the engine's queue, {window}")
    _not_completed(axes[1], systems)
    _throughput(axes[curves - 1], systems, width_s)
    for axis, one in zip(axes[curves:], banded, strict=True):
        band(axis, one)
    axes[-1].set(xlabel="time since the start of the replay (s)", xlim=(0, duration_s))
    _legend(figure, len(systems))
    return figure


def _legend(figure: Figure, systems: int) -> None:
    """Draw the systems' names above a figure of several, as its first axes have them."""
    if systems > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=min(6, systems))


def _percentile(
    axis: Any,
    systems: Sequence[MeasuredSystem],
    metric: Callable[[Results], Floats],
    width_s: float,
    title: str,
) -> None:
    """Draw the P90 of completed requests over time, on a scale that ends at SHORTEST_S."""
    curves = []
    for one in systems:
        values = np.where(one.results.ok, metric(one.results), np.nan)
        points, heights = series.rolling(
            one.results.floats("sent_s"), values, width_s, one.results.run.duration_s, 90
        )
        curves.append((points, np.maximum(heights, SHORTEST_S)))
    drawn = np.concatenate([heights[heights > 0] for _, heights in curves])
    unit, factor = _unit(drawn)
    for place, (points, heights) in enumerate(curves):
        axis.plot(points, heights * factor, **line(place))
    axis.set(ylabel=unit)
    axis.set_title(title)
    if len(drawn):
        scale(axis.yaxis, drawn.min() * factor, drawn.max() * factor)


def _throughput(axis: Any, systems: Sequence[MeasuredSystem], width_s: float) -> None:
    """Draw the output tokens of all requests over time."""
    for place, one in enumerate(systems):
        rates = tokens_per_s(one.results, width_s) / width_s
        axis.step(np.arange(len(rates)) * width_s, rates, where="post", **line(place))
    axis.set(ylabel="tokens/s", ylim=(0, None))
    axis.set_title(f"Output tokens per second, in each {width_s:g} s")


def _unit(values_s: Floats) -> tuple[str, float]:
    """Return the unit to show times in, and how many of it are a second."""
    return ("ms", 1e3) if len(values_s) and values_s.max() < 1 else ("seconds", 1.0)


def _not_completed(axis: Any, systems: Sequence[MeasuredSystem]) -> None:
    """Draw above the curves a cross for each request that was sent and not completed."""
    for place, one in enumerate(systems):
        sent = one.results.floats("sent_s")
        lost = sent[~one.results.ok & ~np.isnan(sent)]
        if len(lost):
            kept = lost[:: 1 + len(lost) // series.MOST_POINTS]
            where = axis.get_xaxis_transform()
            colour = line(place)["color"]
            axis.plot(
                kept,
                np.full(len(kept), 1.0),
                "x",
                color=colour,
                ms=4,
                mew=1,
                transform=where,
                clip_on=False,
            )
    if not all(one.results.ok.all() for one in systems):
        axis.set_title(axis.get_title(loc="left") + "; × not completed", pad=9)


def _phases(axes: Sequence[Any], results: Results) -> None:
    """Shade every second phase, and write names above."""
    found = stretches(results)
    total_s = max(1e-9, results.run.duration_s)
    for number, phase in enumerate(found):
        if number % 2:
            for axis in axes:
                axis.axvspan(phase.start_s, phase.end_s, color=SHADE, linewidth=0, zorder=0)
        if (phase.end_s - phase.start_s) / total_s > LABEL_SHARE and len(
            {one.phase for one in found}
        ) > 1:
            middle = (phase.start_s + phase.end_s) / 2
            where = axes[0].get_xaxis_transform()
            axes[0].text(
                middle,
                1.02,
                phase.phase,
                ha="center",
                va="bottom",
                transform=where,
                color=FAINT,
                size=8,
            )


@styled
def bars(systems: Sequence[MeasuredSystem]) -> Figure:
    """Draw time per output token, of each phase where there are phases, and peak throughput. After
    the paper's Fig. 9.
    """
    names = list(dict.fromkeys(stretch.phase for stretch in stretches(systems[0].results)))
    phases = names if len(names) > 1 else [None]
    step = len(systems) + 0.7
    rows = [
        (number * step + place, phase, place)
        for number, phase in enumerate(phases)
        for place in range(len(systems))
    ]
    figure = Figure(figsize=(WIDTH_IN, 0.9 + 0.27 * (rows[-1][0] + 1)), layout="constrained")
    left, right = figure.subplots(1, 2)
    for at, phase, place in rows:
        values = _tpot_ms(systems[place].results, phase)
        if len(values):
            middle, high = np.percentile(values, [50, 90])
            left.barh(at, middle, color=line(place)["color"], height=0.8)
            left.plot(
                [middle, high, high],
                [at, at, at],
                color=INK,
                linewidth=1,
                marker="|",
                markevery=[2],
                ms=7,
            )
            _beside(left, high, at, f"{_short(middle)}  (P90 {_short(high)})")
    for place, one in enumerate(systems):
        peak = one.summary["max_output_tokens_per_s"]
        right.barh(place, peak, color=line(place)["color"], height=0.8)
        _beside(right, peak, place, f"{peak:,}")
    left.set(xlabel="ms per token", yticks=[at for at, _, _ in rows])
    left.set_yticklabels(
        [systems[place].name + (f", {phase}" if phase else "") for _, phase, place in rows]
    )
    left.set_title("Time per output token: median, line to P90")
    right.set(xlabel="output tokens/s", yticks=range(len(systems)))
    right.set_yticklabels([one.name for one in systems])
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    right.set_title("Peak throughput (best second)")
    for axis in (left, right):
        axis.set(
            xlim=(0, axis.get_xlim()[1] * (1.35 if axis is left else 1.12)),
            ylim=(rows[-1][0] + 0.55, -0.55),
        )
        axis.grid(visible=False, axis="y")
        axis.tick_params(axis="y", length=0)
    return figure


def _tpot_ms(results: Results, phase: str | None) -> Floats:
    """Return the TPOT of completed requests, of a phase or of all, in ms."""
    chosen = (
        results.ok
        if phase is None
        else results.ok & np.asarray(results.texts("phase") == phase, dtype=bool)
    )
    values = tpot_s(results)[chosen] * 1e3
    return values[~np.isnan(values)]


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _beside(axis: Any, x: float, y: float, text: str) -> None:
    axis.annotate(text, (x, y), (5, 0), textcoords="offset points", va="center", size=8)


@styled
def distributions(systems: Sequence[MeasuredSystem]) -> Figure:
    """Draw cumulative distributions of TTFT, TPOT and end-to-end latency of completed requests."""
    figure = Figure(figsize=(WIDTH_IN, 3.1), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    kinds: list[tuple[str, Callable[[Results], Floats]]] = [
        ("Time to first token", ttft_s),
        ("Time per output token", tpot_s),
        ("End to end", e2el_s),
    ]
    for axis, (title, metric) in zip(axes, kinds, strict=True):
        curves = [series.cumulative(metric(one.results)[one.results.ok]) for one in systems]
        drawn = np.concatenate([values for values, _ in curves])
        unit, factor = _unit(drawn)
        for place, (values, shares) in enumerate(curves):
            whole = (
                np.concatenate([values[:1], values]),
                np.concatenate([np.zeros(len(values[:1])), shares]),
            )
            axis.step(
                whole[0] * factor,
                whole[1] * 100,
                where="post",
                label=systems[place].name,
                **line(place),
            )
        axis.set(xlabel=unit if metric is not tpot_s else f"{unit} per token", ylim=(0, 101))
        axis.set(yticks=(0, 25, 50, 75, 90, 100))
        axis.set_title(title)
        if len(drawn):
            scale(axis.xaxis, drawn.min() * factor, drawn.max() * factor)
    axes[0].set(ylabel="completed requests (%)")
    _legend(figure, len(systems))
    return figure
