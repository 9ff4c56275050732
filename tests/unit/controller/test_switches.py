"""Switches: cutover, drain and the worst gap, in whatever order events come; when engines are
told.
"""

import json
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.config import MODES
from flying_serving.controller.gaps import MOST_GAPS
from flying_serving.controller.switches import KEPT, MOST_OPEN, OpenSwitch, Switch, Switches
from flying_serving.layout.groups import Layout
from flying_serving.policy.snapshot import Decision, Need
from flying_serving.wire import SwitchAnswer

OLD, NEW = Layout.uniform(4, 1), Layout.uniform(4, 2)
ANSWERS = [
    SwitchAnswer(1.0, 2.0, 0.1),
    SwitchAnswer(30.0, 0.5, 0.2),
    SwitchAnswer(10.0, 15.0, 0.3),
]


def begin(
    switches: Switches, at_s: float, *draining: str, decision: Decision | None = None
) -> OpenSwitch:
    """Return a switch that begins now, with requests of the old layout."""
    record = Switch(OLD, NEW, "weave", at_s, len(draining), decision)
    opened = OpenSwitch(record, set(draining), 1, "weave")
    switches.begin(opened)
    return opened


def switch(*draining: str) -> OpenSwitch:
    """Return a switch that begins at 100 s."""
    return begin(Switches(), 100.0, *draining)


def test_without_requests_the_drain_ends_with_the_cutover() -> None:
    """Nothing was there to wait for."""
    one = switch()
    assert not one.is_over
    one.acknowledged(ANSWERS, 100.25)
    assert one.is_over
    assert one.switch.cutover_ms == pytest.approx(30.5)
    assert one.switch.drain_ms == pytest.approx(250.0)


def test_the_slowest_engine_is_reported() -> None:
    """Both of its parts, not the largest of each."""
    one = switch()
    one.acknowledged(ANSWERS, 100.25)
    shown = one.switch.to_json()
    assert (shown["in_flight_step_ms"], shown["overhead_ms"]) == (30.0, 0.5)
    assert one.switch.cutover_ms == 30.5
    assert one.switch.work_ms == pytest.approx(0.3)


def test_the_last_request_of_the_old_layout_ends_the_drain() -> None:
    """Those of the new one do not, nor does the same one twice."""
    one = switch("a", "b")
    one.acknowledged(ANSWERS, 100.1)
    one.left("new", 100.2)
    one.left("a", 100.3)
    one.left("a", 100.4)
    assert not one.is_over
    assert one.switch.drain_ms is None
    one.left("b", 101.0)
    assert one.is_over
    assert one.switch.drain_ms == pytest.approx(1000.0)
    one.left("b", 105.0)
    assert one.switch.drain_ms == pytest.approx(1000.0)


def test_requests_that_end_before_the_answers_drain_with_them() -> None:
    """A switch is not over before all engines have answered."""
    one = switch("a")
    one.left("a", 100.05)
    assert not one.is_over
    one.acknowledged(ANSWERS, 100.2)
    assert one.is_over
    assert one.switch.drain_ms == pytest.approx(200.0)


@given(requests=st.sets(st.text("abc", min_size=1, max_size=2), max_size=5), data=st.data())
def test_switch_record_is_right_in_any_order_of_events(
    requests: set[str], data: st.DataObject
) -> None:
    """Answers and ends come as they like: the numbers are those of the last event that counts."""
    events = ["answers", *requests]
    events = data.draw(st.permutations(events))
    one = switch(*requests)
    times = {}
    for number, event in enumerate(events):
        now = 101.0 + number
        times[event] = now
        assert one.is_over == ({"answers", *requests} <= set(events[:number]))
        if event == "answers":
            one.acknowledged(ANSWERS, now)
        else:
            one.left(event, now)
    assert one.is_over
    assert one.switch.cutover_ms == 30.5
    assert one.switch.drain_ms == pytest.approx(
        (max(times[e] for e in ("answers", *requests)) - 100) * 1e3
    )
    assert one.draining == set()


def test_json() -> None:
    """Every field that the route promises, null while it is not known."""
    one = switch("a")
    one.switch.wall_time_s = 1.7e9
    shown = json.loads(json.dumps(one.switch.to_json()))
    assert shown == {
        "number": 1,
        "time": 1.7e9,
        "from": [[0], [1], [2], [3]],
        "to": [[0, 1], [2, 3]],
        "mode": "weave",
        "reason": "ordered by an operator",
        "predicted_request_s": None,
        "predicted_stay_request_s": None,
        "predicted_gain_request_s": None,
        "predicted_cost_request_s": None,
        "promised_request_s": None,
        "least_gain_request_s": None,
        "unsure_at_requests_per_s": None,
        "considered_request_s": None,
        "requests_in_flight": 1,
        "waited_for_idle_ms": 0.0,
        "cutover_ms": None,
        "in_flight_step_ms": None,
        "overhead_ms": None,
        "work_ms": 0.0,
        "drain_ms": None,
        "worst_token_gap_ms": 0.0,
        "predicted_gain_share": None,
        "seen_gain_share": None,
        "problem": None,
    }
    one.acknowledged(ANSWERS, 100.2)
    one.left("a", 100.3)
    shown = one.switch.to_json()
    assert None not in [shown[name] for name in shown if name.endswith("_ms")]


def test_json_of_a_decision() -> None:
    """Both numbers and what else was considered; a gain without limit has no number in JSON."""
    one = switch().switch
    one.decision = Decision(
        NEW, "weave", "load: 1.00 requests/s", 12.5, 0.5, {"weave": 0.5, "hard": 3.0}, 90.0, 10.0
    )
    shown = json.loads(json.dumps(one.to_json(), allow_nan=False))
    assert shown["reason"] == "load: 1.00 requests/s"
    assert shown["predicted_gain_request_s"] == 12.5
    assert shown["predicted_cost_request_s"] == 0.5
    assert shown["predicted_stay_request_s"] == 90.0
    assert shown["least_gain_request_s"] == 10.0
    assert shown["considered_request_s"] == {"weave": 0.5, "hard": 3.0}
    one.decision = replace(one.decision, promised=1.25, predicted={NEW: 77.5, OLD: 90.0})
    shown = json.loads(json.dumps(one.to_json()))
    assert shown["promised_request_s"] == 1.25
    assert shown["predicted_request_s"] == {"{0,1}+{2,3}": 77.5, "{0}+{1}+{2}+{3}": 90.0}
    one.decision = Decision(NEW, "weave", "context: a request needs 2 engines", math.inf, 0.5)
    assert (
        json.loads(json.dumps(one.to_json(), allow_nan=False))["predicted_gain_request_s"] is None
    )


def test_a_failed_switch_is_over() -> None:
    """With its problem, whether requests drain or migrate or not."""
    one = switch("a", "b")
    one.migrating.add("b")
    one.failed("engine 1 did not answer", 101.0)
    assert one.is_over
    one.left("a", 105.0)
    assert one.switch.problem == "engine 1 did not answer"
    assert one.switch.drain_ms == 1000.0


@pytest.mark.parametrize("mode", MODES)
def test_engines_of_changed_groups_wait_for_their_leaving_streams(mode: str) -> None:
    """Engines whose group is another one then, if streams move."""
    switch = Switch(Layout(((0, 1), (2,), (3,))), Layout(((0, 1), (2, 3))), mode, 100.0, 1)
    assert switch.paused_engines == ([2, 3] if mode in ("soft", "migrate") else [])


def test_gaps_count_while_a_switch_is_open() -> None:
    """From its order on, of any stream; a first token has none before it, one that came back
    neither.
    """
    switches = Switches()
    switches.got_token("a", 90.0)
    switches.got_token("b", 99.0)
    one = begin(switches, 100.0, "b")
    switches.got_token("a", 100.5)
    assert one.switch.worst_token_gap_ms == pytest.approx(500.0)
    switches.got_token("new", 103.0)
    switches.ended("a", 103.0)
    switches.got_token("a", 105.0)
    assert one.switch.worst_token_gap_ms == pytest.approx(500.0)
    two = begin(switches, 105.0)
    switches.got_token("a", 106.0)
    assert one.switch.worst_token_gap_ms == 1000.0
    assert two.switch.worst_token_gap_ms == 1000.0
    one.acknowledged(ANSWERS, 106.0)
    switches.ended("b", 107.0)
    switches.got_token("a", 110.0)
    assert one.switch.drain_ms == pytest.approx(7000.0)
    assert one.switch.worst_token_gap_ms == 1000.0
    assert two.switch.worst_token_gap_ms == 4000.0


def test_the_gap_of_a_stream_that_migrates_counts_until_its_next_token() -> None:
    """Whatever else is over by then; a request without a token has no gap."""
    switches = Switches()
    switches.got_token("a", 99.0)
    one = begin(switches, 100.0, "a", "prompt")
    switches.migrated("a", 100.1)
    switches.migrated("prompt", 100.1)
    one.acknowledged(ANSWERS, 100.2)
    assert one.switch.drain_ms == pytest.approx(200.0)
    assert one.switch.open
    switches.got_token("prompt", 103.0)
    assert one.switch.open
    switches.got_token("a", 102.5)
    assert one.switch.worst_token_gap_ms == pytest.approx(2500.0)
    assert not one.switch.open
    two = begin(switches, 110.0, "a")
    switches.migrated("a", 110.1)
    two.acknowledged(ANSWERS, 110.2)
    switches.ended("a", 111.0)
    assert not two.switch.open


def test_a_token_costs_the_same_however_many_switches_are_open() -> None:
    """Looked at are neither the switches nor, beyond the longest of late, the gaps."""
    switches = Switches()
    for number in range(10 * MOST_OPEN):
        begin(switches, float(number), "long")
    looked_at: list[int] = []

    class Watched(deque[OpenSwitch]):
        def __iter__(self) -> Iterator[OpenSwitch]:
            looked_at.append(len(self))
            return super().__iter__()

    switches._open = Watched(switches._open)
    for number in range(5000):
        switches.got_token("long", 1000.0 + number / 100 - number**2 / 1e6)
    assert looked_at == []
    assert len(switches._gaps._gaps) <= MOST_GAPS
    switches.ended("long", 2000.0)
    assert looked_at != []


def test_open_switches_are_bounded() -> None:
    """The end of the oldest is not waited for: it is over, without a drain, with the gaps until
    then.
    """
    switches = Switches()
    switches.got_token("long", 0.0)
    made = []
    for number in range(3 * MOST_OPEN):
        one = begin(switches, float(number), "long")
        one.acknowledged(ANSWERS, number + 0.1)
        made.append(one.switch)
        switches.got_token("long", number + 0.5)
    switches.got_token("long", 1000.0)
    gone, kept = made[:-MOST_OPEN], made[-MOST_OPEN:]
    assert not any(one.open or one.drain_ms is not None for one in gone)
    assert [one.worst_token_gap_ms for one in gone] == [pytest.approx(1000.0)] * len(gone)
    assert all(one.open for one in kept)
    switches.ended("long", 1001.0)
    assert not any(one.open for one in made)
    assert [one.worst_token_gap_ms for one in kept] == [pytest.approx(1e6 - 191_500.0)] * MOST_OPEN


def test_numbers_go_on_when_old_switches_are_forgotten() -> None:
    """The last ones are kept."""
    switches = Switches()
    for number in range(KEPT + 5):
        assert begin(switches, float(number)).switch.number == number + 1
    assert switches.count == KEPT + 5
    assert [one.number for one in switches.kept] == list(range(6, KEPT + 6))


@given(
    times=st.lists(st.floats(0, 300), max_size=12).map(sorted),
    reasons=st.data(),
    later_s=st.floats(0, 100),
)
def test_promises_of_long_requests_fade_over_the_horizon(
    times: list[float], reasons: st.DataObject, later_s: float
) -> None:
    """Operators and switches for load promise nothing."""
    switches = Switches()
    now_s = max(times, default=0.0) + later_s
    expected = 0.0
    for at_s in times:
        reason = reasons.draw(st.sampled_from(["operator", "load", "context"]))
        if reason == "operator":
            begin(switches, at_s, decision=None)
        elif reason == "load":
            for_load(switches, at_s)
        else:
            for_length(switches, at_s, 4.0)
            expected += 4.0 * max(0.0, 1.0 - (now_s - at_s) / 20.0)
    assert switches.promised(20.0, now_s) == pytest.approx(expected)


def for_length(switches: Switches, at_s: float, promise: float) -> OpenSwitch:
    """Begin a switch for a long request."""
    decision = Decision(NEW, "weave", "context", math.inf, 0.5, promise=promise)
    return begin(switches, at_s, decision=decision)


def for_load(switches: Switches, at_s: float) -> OpenSwitch:
    """Begin a switch for load that is predicted to gain 50 request-seconds."""
    return begin(switches, at_s, decision=Decision(NEW, "weave", "load", 50.0, 0.5, stay=100.0))


def test_switch_that_is_not_made_leaves_no_promise() -> None:
    switches = Switches()
    for_length(switches, 0.0, 50.0)
    for_length(switches, 10.0, 50.0).failed("cancelled", 10.1)
    assert switches.promised(20.0, 11.0) == pytest.approx(50.0 * 9 / 20)


def test_void_promises_count_no_more() -> None:
    """Those of later switches do."""
    switches = Switches()
    for_length(switches, 0.0, 50.0)
    switches.void_promises()
    assert switches.promised(20.0, 1.0) == 0.0
    for_length(switches, 1.0, 50.0)
    assert switches.promised(20.0, 1.0) == pytest.approx(50.0)


def test_promise_of_a_need_counts_from_the_last_need_of_its_kind() -> None:
    switches = Switches()
    for_length(switches, 0.0, 8.0)
    switches.needed_again(10.0)
    assert switches.promised(20.0, 15.0) == pytest.approx(6.0)


@pytest.mark.parametrize(("needs", "left"), [((), 0.5), ((True,), 0.5), ((True, False), 1.0)])
def test_urgent_need_does_not_prolong_the_promise_for_length(
    needs: tuple[bool, ...], left: float
) -> None:
    switches = Switches()
    for_length(switches, 0.0, 8.0)
    switches.note_needs([Need(2, urgent=urgent, reason="") for urgent in needs], 10.0)
    assert switches.promised(20.0, 10.0) == pytest.approx(8.0 * left)


@pytest.mark.parametrize(("after_s", "settled"), [(0.0, False), (1.9, False), (2.0, True)])
def test_switch_for_load_follows_another_only_once_that_has_settled(
    after_s: float, settled: bool
) -> None:
    """Whatever else was switched since: for a long request, by an operator, or not at all."""
    switches = Switches()
    assert switches.are_settled(5.0)
    for_load(switches, 5.0)
    at_s = 5.0 + after_s
    for_length(switches, at_s, 50.0)
    begin(switches, at_s)
    for_load(switches, at_s).switch.was_dropped = True
    assert switches.are_settled(at_s) == settled


def test_switches_for_load_of_the_last_minute_are_recent() -> None:
    switches = Switches()
    for at_s in (0.0, 30.0, 61.0):
        begin(switches, at_s, decision=Decision(NEW, "weave", "load", 50.0, 0.5, stay=100.0))
    assert switches.recent(62.0) == 2


def test_switches_of_an_operator_or_for_long_requests_do_not_count() -> None:
    switches = Switches()
    begin(switches, 0.0, decision=Decision(NEW, "weave", "context", math.inf, 0.5))
    begin(switches, 1.0, decision=None)
    assert switches.recent(2.0) == 0
