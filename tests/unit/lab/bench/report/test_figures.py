"""Figures: every axis has a unit, the same results give the same picture."""

import itertools

import numpy as np
import pytest
from matplotlib.figure import Figure

from flying_lab.bench import switchlog
from flying_lab.bench.report import figures, gaps, series, style
from flying_lab.bench.report.page import FIGURES, svg
from flying_lab.results.metrics import token_gaps
from tests.unit.lab.bench.report.systems import band_edges, system

PAIR = [system("static-dp", lost=2), system("auto", 20.0, 50.0)]


@pytest.mark.parametrize("name", list(FIGURES))
def test_every_axis_says_what_it_shows_and_in_which_unit(name: str) -> None:
    """The axes at the bottom and at the left; those above share the one below."""
    figure = FIGURES[name][0](PAIR)
    assert isinstance(figure, Figure)
    shared = name == "over_time"
    for axis in figure.axes:
        assert axis.get_title(loc="left")
        assert axis.get_xlabel() or (shared and axis is not figure.axes[-1])
        categories = any(
            label.get_text() in ("auto", "auto, low") for label in axis.get_yticklabels()
        )
        assert (
            axis.get_ylabel() or categories or axis.get_shared_y_axes().joined(axis, figure.axes[0])
        )
    text = " ".join(axis.get_xlabel() + axis.get_ylabel() for axis in figure.axes)
    assert any(unit in text for unit in ("(s)", "seconds", "ms", "tokens/s"))


@pytest.mark.deep
@pytest.mark.parametrize("name", list(FIGURES))
def test_the_same_results_give_the_same_picture(name: str) -> None:
    first, second = (FIGURES[name][0](PAIR) for _ in range(2))
    assert first is not None and second is not None
    assert svg(first, name) == svg(second, name)


def test_without_switches_the_layout_is_one_block_and_gaps_have_no_figure() -> None:
    """And without a log there is no band."""
    fixed = system("static-dp")
    assert gaps.gaps_at_switches([fixed]) is None
    figure = figures.over_time([fixed])
    assert band_edges(figure) == [0.0, fixed.results.run.duration_s]
    without = type(fixed)("stock-dp", fixed.results, fixed.summary)
    assert len(figures.over_time([without]).axes) == 4


def test_requests_that_were_not_completed_are_marked() -> None:
    """At the times at which they were sent."""
    axis = figures.over_time(PAIR).axes[1]
    crosses = [line for line in axis.get_lines() if line.get_marker() == "x"]
    assert len(crosses) == 1
    assert (
        np.asarray(crosses[0].get_xdata()).tolist() == PAIR[0].results.floats("sent_s")[:2].tolist()
    )
    assert "not completed" in axis.get_title(loc="left")


def test_system_without_completed_requests_is_drawn() -> None:
    nothing = system("broken", requests=3, lost=3, phases=False)
    assert all(
        draw([nothing]) is None or svg(draw([nothing]), name) for name, (draw, _) in FIGURES.items()
    )


def test_gaps_near_a_switch_are_those_around_its_order() -> None:
    """Of all the gaps of 0.1 s, those that touch the window of the one switch."""
    one = system("auto", 50.0)
    figure = gaps.gaps_at_switches([one])
    assert figure is not None
    begin, end = token_gaps(one.results)
    at = switchlog.at_s(one.switches[0], one.results.run)
    near = int(((begin <= at + 0.005 + series.AROUND_S) & (end >= at)).sum())
    legend = figure.axes[0].get_legend()
    assert legend is not None
    labels = [text.get_text() for text in legend.get_texts()]
    assert (
        f"near a switch: {near:,};" in labels[1]
        and f"elsewhere: {len(begin) - near:,};" in labels[0]
    )


def test_degrees_without_a_colour_of_their_own_take_the_next_lower_one() -> None:
    """Three devices per engine, 32 in a group."""
    assert (
        style.degree_colour(3) == style.DEGREES[2] and style.degree_colour(32) == style.DEGREES[16]
    )


def luminance(colour: str) -> float:
    """Return the relative luminance of a colour (WCAG 2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_degrees_are_told_apart_without_colour() -> None:
    """Each is clearly darker than the one before."""
    values = [luminance(colour) for colour in style.DEGREES.values()]
    assert all(
        (brighter + 0.05) / (darker + 0.05) > 1.5 for brighter, darker in itertools.pairwise(values)
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.1234, "0.123"),
        (52.34, "52.3"),
        (999.4, "999"),
        (999.6, "1,000"),
        (26512.0, "26,512"),
    ],
)
def test_numbers_are_plain(value: float, text: str) -> None:
    """No power of ten in a legend."""
    assert style.plain(value) == text
