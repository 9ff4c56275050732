"""The style of figures: few lines, every axis with a unit, colours that hold for colour-blind
readers.
"""

import math
from collections.abc import Mapping
from typing import Any

from matplotlib import rc_context
from matplotlib.ticker import FuncFormatter

INK, FAINT, GRID, SHADE = "#222222", "#6b6b6b", "#e4e4e4", "#f3f1ea"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""The colours of Okabe and Ito (jfly.uni-koeln.de/color) that stand out on white."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (5, 1.5, 1.2, 1.5)), (0, (1.4, 1.2)))
"""Lines differ in more than colour."""
DEGREES: Mapping[int, str] = {1: "#d3e3f0", 2: "#8dbbdc", 4: "#3f89bd", 8: "#0f528c", 16: "#062a52"}
"""Light to dark by degree: an order that is seen without colour too."""
WIDTH_IN = 9.0
DECADE = 10.0
MARGIN = 1.1

_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "xtick.minor.pad": 6.5,  # as far away as the labels of major ticks
    "ytick.minor.pad": 6.5,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "svg.fonttype": "path",  # looks the same on every machine
    "svg.hashsalt": "flying-serving",
    "savefig.dpi": 150,
}


styled = rc_context(_RC)
"""Decorator that draws with this style in place of the caller's."""
LABEL_SHARE = 0.045
"""A layout that takes less of the width than this has no label inside."""


def line(position: int) -> dict[str, Any]:
    """Return the colour and dashes of the system at this place of a comparison."""
    return {"color": COLOURS[position % len(COLOURS)], "linestyle": DASHES[position % len(DASHES)]}


def degree_colour(degree: int) -> str:
    """Return the colour of a group, by its number of devices."""
    return (
        DEGREES.get(degree) or DEGREES[max(known for known in DEGREES if known <= max(1, degree))]
    )


def plain(value: float) -> str:
    """Return a number with three digits, or all before the point: never a power of ten."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def scale(axis: Any, low: float, high: float) -> None:
    """Set a logarithmic axis for values that span a decade or more, and otherwise a linear one from
    0.

    Ticks are plain numbers: 0.1, 1, 10; 2 and 5 as well where that leaves room.
    """
    wide = 0 < low <= high / DECADE
    horizontal = axis.axis_name == "x"
    (axis.axes.set_xscale if horizontal else axis.axes.set_yscale)("log" if wide else "linear")
    limits = (low / MARGIN, high * MARGIN) if wide else (0.0, high * MARGIN or 1.0)
    (axis.axes.set_xlim if horizontal else axis.axes.set_ylim)(limits)
    if wide:
        few = high < low * 100
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(
            FuncFormatter(
                lambda value, _: f"{value:g}" if few and _leading(value) in (2, 5) else ""
            )
        )


def _leading(value: float) -> int:
    """Return the first digit of a number."""
    return round(value / 10 ** math.floor(math.log10(value) + 1e-9)) if value > 0 else 0
