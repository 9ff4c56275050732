"""Switches are counted once, whenever their records are looked at."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.controller.switches import OpenSwitch, Switch, Switches
from flying_serving.layout.groups import Layout
from flying_serving.policy.snapshot import Decision
from flying_serving.server.figures.switches import SwitchTally, reason_kind, shape
from flying_serving.wire import SwitchAnswer

APART, TOGETHER, MIXED = Layout.uniform(4, 1), Layout.uniform(4, 4), Layout(((0, 1), (2,), (3,)))
ANSWER = SwitchAnswer(30.0, 10.0, 0.1)


def decision(reason: str) -> Decision:
    return Decision(TOGETHER, "weave", reason, math.inf, 0.0)


def begin(
    switches: Switches, new: Layout, mode: str, at_s: float, *draining: str, reason: str = ""
) -> OpenSwitch:
    """Return a switch that begins, of an operator without a reason."""
    why = decision(reason) if reason else None
    opened = OpenSwitch(Switch(APART, new, mode, at_s, 0, why), set(draining), 1, mode)
    switches.begin(opened)
    return opened


def test_a_shape_stands_for_one_layout() -> None:
    """Also for those with the same groups elsewhere."""
    layouts = Layout.all(8, (1, 2, 4, 8))
    assert len({shape(layout) for layout in layouts}) == len(layouts)
    assert shape(MIXED) == "2+1+1"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("load: 3.20 requests/s, 7 waiting", "load"),
        ("context: a request needs 2 engines", "context"),
        ("context: a request needs 2 engines; priority: 1 urgent requests", "context+priority"),
        ("no request needs a group", "idle"),
        (None, "operator"),
    ],
)
def test_the_kind_of_a_reason_has_no_figures(reason: str | None, kind: str) -> None:
    """They would make a time series of every switch."""
    assert reason_kind(decision(reason) if reason else None) == kind


def test_a_switch_counts_at_its_cutover_and_its_drain_at_its_end() -> None:
    """Each into its own histogram, in seconds."""
    switches, tally = Switches(), SwitchTally()
    one = begin(switches, TOGETHER, "hard", 10.0, "a", reason="load: x")
    assert tally.update(switches.kept) == [one.switch]
    assert not tally.made
    one.acknowledged([ANSWER], 10.1)
    assert tally.update(switches.kept) == []
    assert dict(tally.made) == {("1+1+1+1", "4", "load", "hard"): 1}
    assert tally.cutover_s["hard"].row[0] == pytest.approx(0.04)
    assert tally.drain_s["hard"].count == 0
    switches.got_token("a", 10.5)
    switches.got_token("a", 11.5)
    switches.ended("a", 12.0)
    tally.update(switches.kept)
    tally.update(switches.kept)
    assert tally.drain_s["hard"].row[0] == pytest.approx(2.0)
    assert tally.drain_s["hard"].count == 1
    assert tally.worst_gap_s["hard"].row[0] == pytest.approx(1.0)
    assert tally.cutover_s["hard"].count == 1
    assert tally.cutover_s["weave"].count == 0


def test_a_switch_that_an_engine_did_not_answer_is_a_failure() -> None:
    """And no switch: nothing is known of its times."""
    switches, tally = Switches(), SwitchTally()
    one = begin(switches, TOGETHER, "weave", 10.0)
    tally.update(switches.kept)
    one.failed("engine 1 did not answer", 70.0)
    switches.prune()
    tally.update(switches.kept)
    tally.update(switches.kept)
    assert tally.failed["weave"] == 1
    assert not tally.made
    assert tally.drain_s["weave"].count == 0


def test_a_switch_that_was_dropped_is_neither_made_nor_a_failure() -> None:
    """Nothing is wrong with the server."""
    switches, tally = Switches(), SwitchTally()
    one = begin(switches, TOGETHER, "sequential", 10.0, "a")
    one.failed("cancelled", 11.0)
    one.switch.was_dropped = True
    switches.prune()
    tally.update(switches.kept)
    tally.update(switches.kept)
    assert tally.failed["sequential"] == 0
    assert not tally.made


@given(st.lists(st.sampled_from(["begin", "acknowledge", "end", "fail", "look"]), max_size=40))
def test_none_is_lost_or_counted_twice_however_often_one_looks(events: Sequence[str]) -> None:
    """Records are followed through all orders of events; at the end all are accounted for."""
    switches, tally = Switches(), SwitchTally()
    open_, seen = [], []
    for number, event in enumerate(events):
        now_s = float(number)
        if event == "begin":
            open_.append(begin(switches, MIXED, "weave", now_s, f"r{number}"))
        elif event == "look":
            seen += tally.update(switches.kept)
        elif open_ and event == "acknowledge" and open_[0].switch.cutover_ms is None:
            open_[0].acknowledged([ANSWER], now_s)
        elif open_ and event == "fail" and open_[0].switch.cutover_ms is None:
            open_.pop(0).failed("lost", now_s)
        elif open_ and event == "end" and open_[0].switch.cutover_ms is not None:
            switches.ended(next(iter(open_.pop(0).draining)), now_s)
        switches.prune()
    seen += tally.update(switches.kept)
    tally.update(switches.kept)
    kept = list(switches.kept)
    assert seen == kept
    assert tally.failed["weave"] == sum(switch.problem is not None for switch in kept)
    assert tally.made.total() == sum(switch.cutover_ms is not None for switch in kept)
    assert tally.drain_s["weave"].count == sum(
        s.cutover_ms is not None and not s.open for s in kept
    )
