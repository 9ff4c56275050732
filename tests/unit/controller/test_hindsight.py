"""Hindsight: what followed a switch for load, beside its forecast."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.controller.hindsight import LEAST_SPAN_S, Hindsight
from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Layout
from flying_serving.policy.snapshot import Decision
from flying_serving.predict.arrivals import CHANGE_S
from flying_serving.predict.forecast import evaluate
from flying_serving.predict.work import Objective, Work
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell
from tests.unit.policy.costs import costs
from tests.unit.policy.snapshots import lanes_of

HORIZON_S = 20.0
NARROW, WIDE = Layout.uniform(2, 1), Layout.uniform(2, 2)
LANES = lanes_of(costs((1, 2), fixed=0.5, rest=0.65))
WORK = Work(2.0, 300.0, 60.0, 0.0)
STAY, THERE = (evaluate(layout, LANES, WORK, Objective(HORIZON_S)) for layout in (NARROW, WIDE))
SUM_S = THERE * 0.9
"""Request-seconds that are seen until the horizon, if the forecast was right, about."""


def joined(cost: float = 0.0) -> Switch:
    """Return a switch for load that joins both engines."""
    decision = Decision(WIDE, "weave", "load", 1.0, cost, stay=STAY, least_gain=0.0)
    return Switch(NARROW, WIDE, "weave", 0.0, 0, decision=decision)


def follow(
    hindsight: Hindsight,
    switch: Switch | None,
    request_s: float = SUM_S,
    *,
    begin_s: float = 0.0,
    span_s: float = HORIZON_S,
    arrived: int | None = None,
) -> None:
    """Let a span pass in which requests arrive as predicted, and take `request_s`."""
    layout = WIDE if switch is None else switch.new
    hindsight.begin(layout, LANES, WORK, begin_s, switch)
    hindsight.count(request_s / span_s, begin_s)
    for _ in range(round(WORK.rate * span_s) if arrived is None else arrived):
        hindsight.arrived()
    hindsight.begin(layout, LANES, WORK, begin_s + span_s)


def test_a_switch_that_followed_its_forecast_gained_as_predicted() -> None:
    switch = joined()
    follow(Hindsight(HORIZON_S), switch)
    assert switch.predicted_share == pytest.approx(1 - THERE / STAY)
    assert switch.seen_share == pytest.approx(switch.predicted_share, abs=0.1)


def test_the_cost_of_the_switch_is_part_of_its_forecast() -> None:
    switch = joined(cost=0.25 * STAY)
    follow(Hindsight(HORIZON_S), switch)
    assert switch.predicted_share == pytest.approx(0.75 - THERE / STAY)


@given(seen=st.lists(st.floats(0.0, 50 * SUM_S), min_size=2, max_size=2).map(sorted))
def test_more_requests_than_predicted_make_the_next_switch_less_likely(seen: list[float]) -> None:
    """And switches to other groups no less."""
    found = []
    for request_s in seen:
        hindsight, switch = Hindsight(HORIZON_S), joined()
        follow(hindsight, switch, request_s)
        assert switch.seen_share is not None
        found.append((-switch.seen_share, hindsight.shortfalls(HORIZON_S)[2]))
        assert hindsight.shortfalls(HORIZON_S).keys() == {2}
    assert found == sorted(found)
    assert all(0.0 <= shortfall <= 0.2 for _, shortfall in found)


def test_a_shortfall_that_is_seen_again_counts_more_and_fades() -> None:
    hindsight, found = Hindsight(HORIZON_S), []
    for number in range(4):
        begin_s = number * (HORIZON_S + 1)
        follow(hindsight, joined(), 2 * STAY, begin_s=begin_s)
        follow(hindsight, None, begin_s=begin_s + HORIZON_S, span_s=1.0, arrived=2)
        found.append(hindsight.shortfalls(begin_s + HORIZON_S)[2])
    assert found == sorted(found)
    assert found[-1] > 2 * found[0] > 0.0
    now_s = 4 * (HORIZON_S + 1)
    assert hindsight.shortfalls(now_s + CHANGE_S)[2] < 0.6 * hindsight.shortfalls(now_s)[2]


def test_a_span_of_few_requests_is_little_evidence() -> None:
    found = []
    for arrived in (1, 1000):
        hindsight = Hindsight(HORIZON_S)
        follow(hindsight, joined(), 1e9, arrived=arrived)
        found.append(hindsight.shortfalls(HORIZON_S)[2])
    assert found[0] < 0.1 * found[1]


def test_an_error_that_the_layout_before_had_too_is_not_the_switch_s() -> None:
    """Half as many requests again as in the forecast, before and after."""
    found = []
    for before in (SUM_S, 1.5 * SUM_S):
        hindsight, switch = Hindsight(HORIZON_S), joined()
        for number in range(5):
            follow(hindsight, None, before, begin_s=number * HORIZON_S, arrived=40)
        follow(hindsight, switch, 1.5 * SUM_S, begin_s=5 * HORIZON_S)
        assert switch.seen_share is not None
        found.append(switch.seen_share)
    assert found[0] < found[1] - 0.05


def _no_time(hindsight: Hindsight, switch: Switch) -> None:
    follow(hindsight, switch, 1e9, span_s=0.9 * LEAST_SPAN_S)


def _failed(hindsight: Hindsight, switch: Switch) -> None:
    switch.problem = "engines were lost"
    follow(hindsight, switch, 1e9)


def _forgotten(hindsight: Hindsight, switch: Switch) -> None:
    hindsight.begin(WIDE, LANES, WORK, 0.0, switch)
    hindsight.forget()
    hindsight.begin(WIDE, LANES, WORK, HORIZON_S)


@pytest.mark.parametrize("passes", [_no_time, _failed, _forgotten])
def test_nothing_is_learned(passes: Callable[[Hindsight, Switch], None]) -> None:
    """In no time, from a switch that failed, and where engines were lost."""
    hindsight, switch = Hindsight(HORIZON_S), joined()
    passes(hindsight, switch)
    assert switch.seen_share is None
    assert hindsight.shortfalls(HORIZON_S) == {}


def test_a_span_begins_when_there_is_none_and_when_the_horizon_has_passed() -> None:
    hindsight = Hindsight(HORIZON_S)
    assert hindsight.count(3.0, 0.0)
    hindsight.begin(NARROW, LANES, WORK, 0.0)
    assert not hindsight.count(3.0, HORIZON_S - 0.1)
    assert hindsight.count(3.0, HORIZON_S)


@pytest.mark.parametrize("is_seen", [True, False])
def test_a_switch_for_load_is_looked_back_on(is_seen: bool) -> None:
    """When its horizon has passed, at a tick; but not with a service-level objective."""
    objective = Objective(HORIZON_S) if is_seen else Objective(HORIZON_S, ttft_s=0.5)
    shell = ModelShell(replace(settings("auto", 2), objective=objective))
    shell.tick()
    shell.acknowledge()
    (switch,) = shell.switches
    assert switch.seen_share is None
    for _ in range(30):
        shell.now_s += 1.0
        shell.tick()
    assert (switch.seen_share is not None) == is_seen
