"""The band of a system's layouts lies where the server's log says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from flying_lab.bench.report import bands, figures, style
from harness.examples import examples
from tests.unit.lab.bench.report.systems import band_edges, system

PAIR = [system("static-dp", lost=2), system("auto", 20.0, 50.0)]


@settings(max_examples=examples(30))
@given(
    at=st.lists(
        st.floats(0.5, 99.5), min_size=1, max_size=8, unique_by=lambda value: round(value, 2)
    )
)
def test_the_band_changes_where_the_log_says(at: list[float]) -> None:
    """To within a millisecond: what is drawn is what the server wrote down, less the start of the
    replay.
    """
    one = system("auto", *sorted(at), requests=2)
    run, figure = one.results.run, Figure()
    bands.band(figure.subplots(), one)
    edges = band_edges(figure)
    assert one.log is not None
    logged = [switch.time_s - run.started_wall_s for switch in one.log.switches]
    assert edges == pytest.approx([0.0, *logged, run.duration_s], abs=1e-3)


def test_the_band_shows_groups_by_height_and_degree_by_colour() -> None:
    """Two rows of degree 1, one block of degree 2."""
    axis = figures.over_time(PAIR).axes[-1]
    found = set()
    for collection in axis.collections:
        for path in collection.get_paths():
            low, high = path.vertices[:, 1].min(), path.vertices[:, 1].max()
            found.add(
                (round(float(low)), round(float(high)), to_hex(collection.get_facecolor()[0]))
            )
    one, two = (style.degree_colour(degree).lower() for degree in (1, 2))
    assert found == {(0, 1, one), (1, 2, one), (0, 2, two)}
