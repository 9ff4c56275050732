"""The idea: the same engines, weights and KV memory at three degrees.

An engine has one copy of the weights. A group of p engines reads one p-th of each copy. The bytes
of a KV block stay where they are: at degree p they hold p times the tokens, of one p-th of the
heads (the Flying Serving paper, arXiv 2602.22593, section 4).
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from experiments.pictures.scheme import ON_LIGHT, PAPER, QUIET
from flying_lab.bench.report.style import COLOURS, FAINT, INK, degree_colour, styled

ENGINES = 4
SIZES = (1, 2, 4)
HEADS = 4
BLOCKS = 4
"""KV blocks of an engine in the picture."""
BLOCK_TOKENS = 16
REQUEST_TOKENS = BLOCKS * BLOCK_TOKENS
"""The request that is marked: it fills one engine."""
TITLES = {1: "4 engines alone", 2: "2 groups of two", 4: "1 group of four"}
PARTS = {1: "all heads", 2: "half of the heads", 4: "a quarter of the heads"}


@styled
def draw() -> Figure:
    """Return the picture: a panel for each degree."""
    figure = Figure(figsize=(9.0, 3.5))
    panels = figure.subplots(1, len(SIZES), gridspec_kw={"wspace": 0.06})
    figure.subplots_adjust(left=0.1, right=0.99, top=0.88, bottom=0.17)
    for axes, size in zip(panels, SIZES, strict=True):
        _panel(axes, size)
    for height, words in ((2.62, "weights"), (1.17, "KV memory")):
        panels[0].text(-0.12, height, words, ha="right", va="center", color=INK)
    figure.text(0.1, 0.03, f"A request of {REQUEST_TOKENS} tokens", color=COLOURS[1], weight="bold")
    figure.text(
        0.295,
        0.03,
        "fills one engine, half of each of two, or a quarter of each of four. No byte moves.",
        color=INK,
    )
    return figure


def _panel(axes: Any, size: int) -> None:
    axes.set(xlim=(-0.04, ENGINES + 0.04), ylim=(-0.12, 3.22))
    axes.axis("off")
    axes.set_title(f"{TITLES[size]} (degree {size})", loc="center", pad=4)
    for first in range(0, ENGINES, size):
        outline = FancyBboxPatch(
            (first + 0.05, 0.12),
            size - 0.1,
            2.9,
            boxstyle="round,pad=0,rounding_size=0.08",
            facecolor="none",
            edgecolor=degree_colour(2 * size),
            linewidth=1.6,
        )
        axes.add_patch(outline)
    for engine in range(ENGINES):
        _weights(axes, engine, size)
        _memory(axes, engine, size)
    block = f"a block: {size * BLOCK_TOKENS} tokens, {PARTS[size]}"
    axes.text(ENGINES / 2, -0.02, block, ha="center", va="center", color=INK)


def _weights(axes: Any, engine: int, size: int) -> None:
    """Draw an engine's copy of the weights, and the part that it reads."""
    share = ENGINES // size
    for part in range(ENGINES):
        reads = (engine % size) * share <= part < (engine % size + 1) * share
        cell = Rectangle(
            (engine + 0.14 + 0.18 * part, 2.42),
            0.18,
            0.4,
            facecolor=degree_colour(4) if reads else QUIET,
            edgecolor=PAPER,
            linewidth=0.8,
        )
        axes.add_patch(cell)
    axes.text(engine + 0.5, 2.18, f"engine {engine}", ha="center", va="center", size=7, color=FAINT)


def _memory(axes: Any, engine: int, size: int) -> None:
    """Draw an engine's KV blocks: heads upwards, tokens to the right."""
    for block in range(BLOCKS):
        is_marked = block < BLOCKS // size and engine < size
        low = 0.24 + 0.46 * block
        colour = COLOURS[1] if is_marked else degree_colour(1)
        axes.add_patch(Rectangle((engine + 0.14, low), 0.72, 0.4, facecolor=colour, linewidth=0))
        for line in range(1, HEADS // size):
            height = low + 0.4 * line * size / HEADS
            axes.plot([engine + 0.14, engine + 0.86], [height] * 2, color=PAPER, linewidth=0.7)
        for line in range(1, size):
            along = engine + 0.14 + 0.72 * line / size
            axes.plot([along] * 2, [low, low + 0.4], color=ON_LIGHT, linewidth=0.7)
