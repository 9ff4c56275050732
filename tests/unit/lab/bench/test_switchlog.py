"""Logs of switches: which layout holds when, and where a log comes from."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_lab.bench import switchlog
from flying_lab.bench.client import Target
from flying_lab.bench.switchlog import Groups, LoggedSwitch, Span, SwitchLog
from flying_lab.errors import BenchError
from flying_lab.results.results import Run
from flying_serving.layout.groups import Layout

APART: Groups = ((0,), (1,))
JOINED: Groups = ((0, 1),)
START_S = 1.7e9
RUN = Run("w", "drawn", 3, "http://there", "m", START_S, 100.0)


def log(*times_s: float, first: int = 1, layout: Groups | None = None) -> SwitchLog:
    """Return the log of a server that began apart and switched at these times of the replay."""
    layouts = [APART, JOINED] * len(times_s)
    switches = [
        LoggedSwitch(first + n, START_S + at, layouts[n], layouts[n + 1])
        for n, at in enumerate(times_s)
    ]
    end = layout if layout is not None else (switches[-1].new if switches else APART)
    return SwitchLog(end, 1, tuple(switches))


def test_layouts_follow_one_another_from_start_to_end() -> None:
    """A switch before the replay sets the first layout, one behind its end is not seen."""
    found = switchlog.spans(log(-5.0, 10.0, 40.0, 200.0), RUN)
    assert found == [Span(0.0, 10.0, JOINED), Span(10.0, 40.0, APART), Span(40.0, 100.0, JOINED)]
    assert [switch.number for switch in switchlog.during(log(-5.0, 10.0, 40.0, 200.0), RUN)] == [
        2,
        3,
    ]


def test_without_switches_the_layout_is_the_present_one() -> None:
    assert switchlog.spans(log(layout=JOINED), RUN) == [Span(0.0, 100.0, JOINED)]


def test_layout_is_unknown_before_a_log_that_was_cut() -> None:
    """Unless the first switch that is kept lies before the replay."""
    assert switchlog.spans(log(10.0, 40.0, first=7), RUN)[0] == Span(10.0, 40.0, JOINED)
    assert switchlog.spans(log(-10.0, 40.0, first=7), RUN)[0] == Span(0.0, 40.0, JOINED)


def test_a_switch_that_still_waits_is_none_yet() -> None:
    """Its time is 0 until the engines are told."""
    waiting = LoggedSwitch(2, 0.0, JOINED, APART)
    made = SwitchLog(JOINED, 1, (*log(10.0).switches, waiting))
    assert switchlog.spans(made, RUN)[-1] == Span(10.0, 100.0, JOINED)
    assert len(switchlog.during(made, RUN)) == 1


@given(
    times_ms=st.lists(st.integers(-50_000, 150_000), max_size=12, unique=True),
    wall_s=st.floats(1e3, 4e9),
)
def test_spans_tile_the_replay_and_lie_at_the_times_of_the_log(
    times_ms: list[int], wall_s: float
) -> None:
    """Every edge is a time of the log, to within the resolution of a clock since the epoch."""
    run = Run("w", "drawn", 3, "http://there", "m", wall_s, 100.0)
    layouts = Layout.all(4, (1, 2, 4))
    groups = [layouts[n % len(layouts)].groups for n in range(len(times_ms) + 1)]
    switches = tuple(
        LoggedSwitch(n + 1, wall_s + at / 1e3, groups[n], groups[n + 1])
        for n, at in enumerate(sorted(times_ms))
    )
    found = switchlog.spans(SwitchLog(groups[-1], 1, switches), run)
    assert sum(span.end_s - span.begin_s for span in found) == pytest.approx(
        100.0 - found[0].begin_s
    )
    assert all(before.end_s == after.begin_s for before, after in itertools.pairwise(found))
    for span in found[1:]:
        assert any(abs(span.begin_s - (switch.time_s - wall_s)) < 1e-6 for switch in switches)
        made = [switch.new for switch in switches if switch.time_s - wall_s <= span.begin_s + 1e-6]
        assert span.groups == made[-1]


def test_a_server_that_is_none_of_ours_has_no_log(mock_url: str) -> None:
    """404 is the answer to that; no server is an error."""
    assert switchlog.fetch(Target(mock_url)) is None
    with pytest.raises(BenchError, match="the log of switches cannot be read"):
        switchlog.fetch(Target("http://127.0.0.1:1"))


def test_a_log_is_kept_with_all_its_fields(tmp_path: Path) -> None:
    """What is not used here stays in the file."""
    path = tmp_path / "switches.json"
    assert switchlog.load(path) is None
    one = {
        "number": 1,
        "time": START_S,
        "from": [[0], [1]],
        "to": [[0, 1]],
        "reason": "load",
        "work_ms": 1.5,
    }
    path.write_text(json.dumps({"layout": [[0, 1]], "devices_per_engine": 2, "switches": [one]}))
    assert json.loads(path.read_text())["switches"][0]["work_ms"] == 1.5
    kept = switchlog.load(path)
    assert kept is not None and (kept.engines, kept.devices_per_engine) == (2, 2)
    assert kept.switches == (LoggedSwitch(1, START_S, APART, JOINED, reason="load"),)
    path.write_text('{"layout": 5}')
    with pytest.raises(BenchError, match="no log of switches"):
        switchlog.load(path)
