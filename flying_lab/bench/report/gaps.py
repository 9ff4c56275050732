"""The figure of gaps between tokens: near switches, and elsewhere."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from flying_lab.bench import switchlog
from flying_lab.bench.report import series
from flying_lab.bench.report.load import MeasuredSystem
from flying_lab.bench.report.style import INK, WIDTH_IN, plain, scale, styled
from flying_lab.results.metrics import token_gaps

SHORTEST_MS = 0.1
"""Shorter gaps, of tokens that come together, are drawn here."""


@styled
def gaps_at_switches(systems: Sequence[MeasuredSystem]) -> Figure | None:
    """Draw how long streams waited for their next token near switches and elsewhere; None if
    nothing switched.
    """
    switching = [one for one in systems if one.switches and len(token_gaps(one.results)[0])]
    if not switching:
        return None
    figure = Figure(figsize=(WIDTH_IN, 0.4 + 2.5 * len(switching)), layout="constrained")
    axes = figure.subplots(len(switching), 1, squeeze=False)[:, 0]
    for axis, one in zip(axes, switching, strict=True):
        _gaps(axis, one)
    return figure


def _gaps(axis: Any, one: MeasuredSystem) -> None:
    begin, end = token_gaps(one.results)
    windows = []
    for switch in one.switches:
        at = switchlog.at_s(switch, one.results.run)
        windows.append((at, at + (switch.cutover_ms or 0.0) / 1e3 + series.AROUND_S))
    near = series.overlapping(begin, end, windows)
    gaps_ms = np.maximum((end - begin) * 1e3, SHORTEST_MS)
    edges = np.geomspace(gaps_ms.min(), gaps_ms.max() * 1.001, 61)
    for chosen, name, look in (
        (~near, "elsewhere", {"color": "#bdbdbd", "histtype": "stepfilled"}),
        (near, "near a switch", {"color": INK, "histtype": "step", "linewidth": 1.5}),
    ):
        if chosen.any():
            median, high, most = np.percentile(gaps_ms[chosen], [50, 99, 100])
            label = (
                f"{name}: {chosen.sum():,}; median {plain(median)}, P99 {plain(high)}, "
                f"longest {plain(most)} ms"
            )
            share = np.full(chosen.sum(), 100.0 / chosen.sum())
            axis.hist(gaps_ms[chosen], bins=edges, weights=share, label=label, **look)
    axis.set(
        yscale="log",
        ylabel="gaps (%)",
        xlabel="ms from one event with tokens to the next of the stream",
    )
    scale(axis.xaxis, gaps_ms.min(), gaps_ms.max())
    scale(axis.yaxis, *axis.get_ylim())
    title = (
        f"Token gaps of {one.name}: from an order until {series.AROUND_S:g} s after its "
        "cutover, and elsewhere"
    )
    axis.set_title(title, pad=32)
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1.0), borderaxespad=0.2, fontsize=8)
