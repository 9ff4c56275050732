"""Two switches of a live server over time: the steps of its engines, and the tokens that its
clients got.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from flying_lab.bench.report.style import COLOURS, INK, degree_colour, styled

AROUND_MS = 60.0
"""Shown before the first switch and after the last."""
GAP = 0.08


@styled
def draw(trace: dict[str, Any]) -> Figure:
    """Return the picture of what `python -m benchmarks.traced_switch` keeps. Time 0 is the first
    switch.
    """
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    tokens, steps = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": (1.0, 1.1)})
    begin_ms = trace["switches"][0]["at_ms"]
    switches_ms = [one["at_ms"] - begin_ms for one in trace["switches"]]
    _tokens(tokens, trace, begin_ms)
    _steps(steps, trace, begin_ms)
    for axes in (tokens, steps):
        for at_ms in switches_ms:
            axes.axvline(at_ms, color=INK, linewidth=0.9)
        axes.grid(visible=False)
    for one, at_ms in zip(trace["switches"], switches_ms, strict=True):
        words = f" {one['what']}, in {one['cutover_ms']:.1f} ms"
        tokens.annotate(
            words, (at_ms, 1.02), xycoords=("data", "axes fraction"), va="bottom", size=8, color=INK
        )
    steps.set(xlabel="ms since the first switch", xlim=(-AROUND_MS, switches_ms[-1] + AROUND_MS))
    return figure


def _tokens(axes: Any, trace: dict[str, Any], begin_ms: float) -> None:
    """Draw a row for each request, with a mark for each token that its client got."""
    arrivals = [np.array(times_ms) - begin_ms for times_ms in trace["tokens_ms"]]
    axes.eventplot(arrivals, colors=COLOURS[1], linelengths=0.7, linewidths=0.8)
    axes.set(ylabel="request", ylim=(len(arrivals) - 0.4, -0.6), yticks=range(len(arrivals)))
    axes.set_title("Tokens as clients get them", pad=18)
    axes.tick_params(axis="y", length=0)


def _steps(axes: Any, trace: dict[str, Any], begin_ms: float) -> None:
    """Draw the steps of each engine, by the size of the group that it steps with."""
    bars: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for step in trace["steps"]:
        bars[step["engine"], step["size"]].append((step["at_ms"] - begin_ms, step["took_ms"]))
    for (engine, size), ranges in bars.items():
        colour = degree_colour(4 if size > 1 else 1)
        axes.broken_barh(
            ranges, (engine + GAP, 1 - 2 * GAP), facecolors=colour, edgecolors=INK, linewidth=0.3
        )
    for pull in trace["pulls"]:
        begins_ms = pull["at_ms"] - begin_ms
        axes.broken_barh(
            [(begins_ms, pull["took_ms"])],
            (pull["engine"] + GAP, 1 - 2 * GAP),
            facecolors=COLOURS[2],
            linewidth=0,
        )
    engines = 1 + max(engine for engine, _ in bars)
    axes.set(ylabel="engine", ylim=(engines, 0), yticks=np.arange(engines) + 0.5)
    axes.set_yticklabels([str(engine) for engine in range(engines)])
    axes.tick_params(axis="y", length=0)
    axes.set_title("Steps of the engines")
    patches = [
        Patch(color=degree_colour(4 if size > 1 else 1), label="together" if size > 1 else "alone")
        for size in sorted({size for _, size in bars})
    ]
    patches.append(Patch(color=COLOURS[2], label="KV is copied"))
    axes.legend(handles=patches, ncols=len(patches), loc="lower right", bbox_to_anchor=(1, 0.98))
