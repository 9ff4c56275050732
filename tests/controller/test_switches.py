"""Switch: cutover, drain and the worst gap, in whatever order answers, ends and tokens come."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Layout

OLD, NEW = Layout.uniform(4, 1), Layout.uniform(4, 2)
REPORTS = [
    {"in_flight_ms": 1.0, "overhead_ms": 2.0, "work_ms": 0.1},
    {"in_flight_ms": 30.0, "overhead_ms": 0.5, "work_ms": 0.2},
    {"in_flight_ms": 10.0, "overhead_ms": 15.0, "work_ms": 0.3},
]


def switch(*draining: str, at: float = 100.0) -> Switch:
    """Return a switch that was ordered at a time, with requests of the old layout."""
    return Switch(1, OLD, NEW, "weave", at, len(draining), 1.7e9, draining=set(draining))


def test_without_requests_the_drain_ends_with_the_cutover() -> None:
    """Nothing was there to wait for."""
    one = switch()
    assert one.open
    one.acknowledged(REPORTS, 100.25)
    assert not one.open
    assert one.cutover_ms == pytest.approx(30.5)
    assert one.drain_ms == pytest.approx(250.0)


def test_the_slowest_engine_is_reported() -> None:
    """Both of its parts, not the largest of each."""
    one = switch()
    one.acknowledged(REPORTS, 100.25)
    assert (one.in_flight_ms, one.overhead_ms) == (30.0, 0.5)
    assert one.cutover_ms == 30.5
    assert one.work_ms == pytest.approx(0.3)


def test_the_last_request_of_the_old_layout_ends_the_drain() -> None:
    """Those of the new one do not, nor does the same one twice."""
    one = switch("a", "b")
    one.acknowledged(REPORTS, 100.1)
    one.finished("new", 100.2)
    one.finished("a", 100.3)
    one.finished("a", 100.4)
    assert one.open
    assert one.drain_ms is None
    one.finished("b", 101.0)
    assert not one.open
    assert one.drain_ms == pytest.approx(1000.0)
    one.finished("b", 105.0)
    assert one.drain_ms == pytest.approx(1000.0)


def test_requests_that_end_before_the_answers_drain_with_them() -> None:
    """A switch is not over before all engines have answered."""
    one = switch("a")
    one.finished("a", 100.05)
    assert one.open
    one.acknowledged(REPORTS, 100.2)
    assert not one.open
    assert one.drain_ms == pytest.approx(200.0)


@given(
    requests=st.sets(st.text("abc", min_size=1, max_size=2), max_size=5),
    data=st.data(),
    gaps=st.lists(st.floats(0, 10), max_size=5),
)
def test_any_order_of_events(requests: set[str], data: st.DataObject, gaps: list[float]) -> None:
    """Answers, ends and tokens come as they like: the numbers are those of the last event that counts."""
    events: list[Any] = ["answers", *requests, *gaps]
    events = data.draw(st.permutations(events))
    one = switch(*requests)
    times = {}
    for number, event in enumerate(events):
        now = 101.0 + number
        times[event] = now
        assert one.open == (not {"answers", *requests} <= set(events[:number]))
        if event == "answers":
            one.acknowledged(REPORTS, now)
        elif isinstance(event, str):
            one.finished(event, now)
        else:
            one.token_gap(event)
    assert not one.open
    assert one.cutover_ms == 30.5
    assert one.drain_ms == pytest.approx((max(times[e] for e in ("answers", *requests)) - 100) * 1e3)
    assert one.worst_token_gap_ms == pytest.approx(max(gaps, default=0.0) * 1e3)
    assert one.draining == set()


def test_json() -> None:
    """Every field that the route promises, null while it is not known."""
    one = switch("a")
    shown = json.loads(json.dumps(one.to_json()))
    assert shown == {
        "number": 1,
        "time": 1.7e9,
        "from": [[0], [1], [2], [3]],
        "to": [[0, 1], [2, 3]],
        "preempt": "weave",
        "requests_in_flight": 1,
        "waited_for_idle_ms": 0.0,
        "cutover_ms": None,
        "in_flight_step_ms": None,
        "overhead_ms": None,
        "work_ms": 0.0,
        "drain_ms": None,
        "worst_token_gap_ms": 0.0,
    }
    one.acknowledged(REPORTS, 100.2)
    one.finished("a", 100.3)
    one.token_gap(0.02)
    assert None not in one.to_json().values()
