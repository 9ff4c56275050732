"""The pictures of README and of docs/, as SVG files that follow the reader's light or dark scheme.

`python -m experiments --pages` draws them: the idea (`idea.py`), a switch of a live server as its
trace has it (`switch.py`, of what `python -m benchmarks.traced_switch` keeps), and the headline
(`headline.py`, of the kept numbers of the simulator).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks import live_report
from benchmarks.traced_switch import KEPT
from experiments.common import ROOT, kept
from experiments.pictures import headline, idea, switch
from experiments.pictures.scheme import themed

FOLDER = ROOT / "docs" / "pictures"
PICTURES: dict[str, Callable[[], Figure]] = {
    "idea": idea.draw,
    "switch": lambda: switch.draw(live_report.read(KEPT)),
    "headline": lambda: headline.draw(kept("phases"), kept("goodput")),
}


def pictures() -> dict[Path, str]:
    """Return the text of each picture, by its file."""
    return {FOLDER / f"{name}.svg": themed(draw(), name) for name, draw in PICTURES.items()}


def write() -> None:
    """Write all pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path, text in pictures().items():
        path.write_text(text, encoding="utf-8")
