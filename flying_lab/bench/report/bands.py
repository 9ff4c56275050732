"""The layout of a system over time, as a coloured band."""

from typing import Any

import numpy as np
from matplotlib.patches import Patch

from flying_lab.bench.report.load import MeasuredSystem
from flying_lab.bench.report.style import INK, LABEL_SHARE, degree_colour

GAP = 0.05
"""The gap between groups of a band, in engines."""


def band(axis: Any, one: MeasuredSystem) -> None:
    """Draw the layout over time: a row for each engine, engines of a group joined, coloured by the
    group's degree.
    """
    assert one.log is not None
    devices = one.log.devices_per_engine
    bars: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    for span in one.spans:
        for group in span.groups:
            bars.setdefault(group, []).append((span.begin_s, span.end_s - span.begin_s))
    total_s = max(1e-9, one.results.run.duration_s)
    for group, ranges in bars.items():
        degree = len(group) * devices
        colour = degree_colour(degree)
        rows = (group[0] + GAP, len(group) - 2 * GAP)
        axis.broken_barh(ranges, rows, facecolors=colour, linewidth=0)
        ink = "white" if degree >= 4 else INK
        for begin_s, length_s in ranges:
            if length_s / total_s > LABEL_SHARE:
                middle = (begin_s + length_s / 2, group[0] + len(group) / 2)
                axis.annotate(f"TP{degree}", middle, ha="center", va="center", size=7, color=ink)
    degrees = sorted({len(group) * devices for group in bars})
    patches = [Patch(color=degree_colour(degree), label=f"TP{degree}") for degree in degrees]
    place = {
        "loc": "lower right",
        "bbox_to_anchor": (1.0, 0.98),
        "borderaxespad": 0.0,
        "handlelength": 1.2,
    }
    axis.legend(handles=patches, ncols=len(patches), fontsize=8, **place)
    count = len(one.switches)
    axis.set_title(f"Layout of {one.name}, {count} switch{'' if count == 1 else 'es'}")
    axis.set(ylabel="engine", ylim=(one.log.engines, 0), yticks=np.arange(one.log.engines) + 0.5)
    axis.set_yticklabels([str(engine) for engine in range(one.log.engines)])
    axis.grid(visible=False)
    axis.tick_params(axis="y", length=0)
