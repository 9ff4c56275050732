"""Changeover: the phases of a switch, and what each of them keeps waiting."""

from dataclasses import replace

import pytest

from flying_serving.config import MODES
from flying_serving.controller.bookings import Bookings
from flying_serving.controller.changeover import PATIENCE, TRANSITIONS, Changeover, SwitchPhase
from flying_serving.controller.commands import Order
from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.splitter import Splitter
from flying_serving.controller.state import ClusterState
from flying_serving.layout.groups import Layout
from flying_serving.policy.snapshot import Decision
from tests.unit.controller.model_settings import ANSWER, settings
from tests.unit.policy.costs import costs, measured

OLD, NEW = Layout.uniform(2, 1), Layout.uniform(2, 2)
DECISION = Decision(NEW, "", "load: 1.00 requests/s", 12.5, 0.5, drain_s=2.0)
WAITS = ("sequential", "soft")


def busy_server() -> tuple[ClusterState, Changeover]:
    """Return two engines that are alone, of which one runs the request "a"."""
    state = ClusterState(settings("manual", 2))
    state.steps.calibrate(measured(costs()))
    bookings = Bookings(state, GroupChoice(state))
    request = RequestState("a", RequestSpec(10, 30, 20), (1, 2), 1, 90.0)
    bookings.start(request, (0,), state.lane_figures())
    state.loads.add_tokens(request, 1)
    return state, Changeover(state, bookings, Splitter(state, GroupChoice(state), bookings))


def begun(mode: str, decision: Decision | None = None) -> tuple[ClusterState, Changeover]:
    """Return that server with a switch to one group, which was decided at 100 s."""
    state, changeover = busy_server()
    changeover.begin(NEW, mode, None, 100.0, decision)
    return state, changeover


def end_old(state: ClusterState) -> None:
    """The request of the old layout ends at 101 s."""
    state.loads.remove(state.started.pop("a"))
    state.switches.ended("a", 101.0)


@pytest.mark.parametrize("mode", MODES)
def test_waiting_switch_holds_back_requests_only_if_sequential(mode: str) -> None:
    _, changeover = begun(mode)
    assert changeover.phase is SwitchPhase.WAITING
    assert changeover.holds_back_requests == (mode == "sequential")


@pytest.mark.parametrize("mode", MODES)
def test_busy_old_group_delays_the_order_of_two_modes(mode: str) -> None:
    _, changeover = begun(mode)
    changeover.advance(100.5)
    assert changeover.phase is (SwitchPhase.WAITING if mode in WAITS else SwitchPhase.ORDERED)


@pytest.mark.parametrize("mode", MODES)
def test_idle_old_groups_let_engines_be_told(mode: str) -> None:
    state, changeover = begun(mode)
    end_old(state)
    order = changeover.advance(102.0)[0]
    assert isinstance(order, Order)
    assert order.switch.ordered_s == 102.0
    assert order.switch.waited_for_idle_ms == 2000.0
    assert state.layout == NEW


@pytest.mark.parametrize("mode", MODES)
def test_ordered_switch_holds_back_requests_only_if_it_migrates(mode: str) -> None:
    state, changeover = begun(mode)
    end_old(state)
    changeover.advance(102.0)
    assert changeover.phase is SwitchPhase.ORDERED
    assert changeover.holds_back_requests == (mode == "migrate")
    changeover.regrouped(103.0)
    assert not changeover.holds_back_requests


@pytest.mark.parametrize("mode", MODES)
def test_answers_of_all_engines_end_the_switch(mode: str) -> None:
    state, changeover = begun(mode)
    end_old(state)
    changeover.advance(102.0)
    changeover.regrouped(103.0)
    changeover.acknowledged([ANSWER], 104.0)
    assert changeover.phase is SwitchPhase.IDLE
    assert not changeover.is_under_way


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("waited_s", "is_overdue"), [(2.0 * PATIENCE, False), (2.1 * PATIENCE, True)]
)
def test_decided_switch_waits_about_as_long_as_predicted(
    mode: str, waited_s: float, is_overdue: bool
) -> None:
    state, changeover = begun(mode, replace(DECISION, mode=mode))
    changeover.advance(100.0 + waited_s)
    hurries = is_overdue and mode in WAITS
    assert (state.switches.kept[-1].mode != mode) == hurries


@pytest.mark.parametrize("mode", WAITS)
def test_switch_of_an_operator_waits_for_any_time(mode: str) -> None:
    state, changeover = begun(mode)
    changeover.advance(1e6)
    assert state.switches.kept[-1].mode == mode


@pytest.mark.parametrize("mode", WAITS)
def test_engine_that_is_back_joins_a_switch_that_waits(mode: str) -> None:
    state, changeover = begun(mode)
    state.switches.kept[-1].new = NEW.without({1})
    changeover.take_in(1)
    assert state.switches.kept[-1].new == OLD


def test_failed_switch_is_over_in_any_phase() -> None:
    for phases in range(3):
        _, changeover = begun("weave")
        for advance in (changeover.advance, changeover.regrouped)[:phases]:
            advance(101.0)
        changeover.fail("engine 1 did not answer", 102.0)
        assert changeover.phase is SwitchPhase.IDLE


def test_phase_out_of_order_is_refused() -> None:
    _, changeover = begun("weave")
    with pytest.raises(RuntimeError, match="a switch: from waiting to regrouped"):
        changeover.regrouped(101.0)


def test_second_switch_at_a_time_is_refused() -> None:
    _, changeover = begun("soft")
    with pytest.raises(RuntimeError, match="a switch: from waiting to waiting"):
        changeover.begin(OLD, "weave", None, 101.0, None)


def test_table_of_phases_has_a_row_for_each() -> None:
    assert set(TRANSITIONS) == set(SwitchPhase)
