"""The pictures of docs/: drawn from what is kept, readable in a light and in a dark scheme."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from experiments.pictures import pictures
from experiments.pictures.scheme import DARK, ON_LIGHT, PAPER
from flying_lab.bench.report.style import COLOURS, FAINT, INK, degree_colour

DRAWN = pictures()
LEAST_CONTRAST = 4.5
"""WCAG 2.2, level AA, of small words; 3 of lines and areas."""
LEAST_OF_LINES = 3.0


def luminance(colour: str) -> float:
    """Of WCAG 2.2: 0 is black, 1 is white."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Of WCAG 2.2: from 1 to 21."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_picture_is_that_of_what_is_kept(path: Path) -> None:
    text = DRAWN[path]
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.stem)
def test_a_picture_has_the_colours_of_both_schemes(path: Path) -> None:
    root = ET.fromstring(DRAWN[path])
    style = next(iter(root)).text or ""
    used = set(re.findall(r"var\(--(\w+)\)", DRAWN[path]))
    assert {PAPER[1:], INK[1:]} <= used
    for colour, dark in DARK.items():
        assert style.count(f"--{colour[1:]}:") == 2
        assert f"--{colour[1:]}:{dark};" in style


@pytest.mark.parametrize("is_dark", [False, True])
def test_words_and_lines_stand_out(is_dark: bool) -> None:
    shown = DARK if is_dark else {}
    paper = shown.get(PAPER, PAPER)
    for colour in (INK, FAINT):
        assert contrast(shown.get(colour, colour), paper) >= LEAST_CONTRAST, colour
    for colour in COLOURS[:3]:
        assert contrast(shown.get(colour, colour), paper) >= LEAST_OF_LINES, colour
    assert contrast(ON_LIGHT, degree_colour(1)) >= LEAST_CONTRAST
