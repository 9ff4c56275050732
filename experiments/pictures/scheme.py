"""Light and dark: an SVG whose colours are those of the reader's scheme."""

from __future__ import annotations

import re
from collections.abc import Mapping

from matplotlib.figure import Figure

from flying_lab.bench.report.page import svg
from flying_lab.bench.report.style import COLOURS, FAINT, GRID, INK

PAPER = "#ffffff"
QUIET = "#d9dde2"
"""Of what takes no part."""
ON_LIGHT = "#102030"
"""Of words on the light colours of `style.DEGREES`, in both schemes."""
DARK: Mapping[str, str] = {
    PAPER: "#14171c",
    INK: "#e8e8e8",
    FAINT: "#a9adb3",
    GRID: "#30353c",
    QUIET: "#3d444d",
    COLOURS[0]: "#58a9e0",
    COLOURS[1]: "#ff8c4a",
    COLOURS[2]: "#2fc39a",
}
"""The dark scheme's colour of each one that differs there."""


def themed(figure: Figure, name: str) -> str:
    """Return a figure as an SVG file on a ground of its own, so that it can be read on any page.

    `name`: the begin of its ids.
    """
    figure.set_facecolor(PAPER)
    for axes in figure.axes:
        axes.set_facecolor(PAPER)
    text = re.sub("|".join(DARK), lambda found: f"var(--{found[0][1:]})", svg(figure, name))
    light, dark = (
        "".join(f"--{colour[1:]}:{value};" for colour, value in colours.items())
        for colours in ({colour: colour for colour in DARK}, DARK)
    )
    style = f"<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    end = text.index(">") + 1
    return f"{text[:end]}\n{style}{text[end:]}\n"
