"""Decider: when the policy is asked, and which answers are kept."""

import pytest

from flying_serving.controller.decider import Decider, Verdict
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.state import ClusterState
from tests.unit.controller.deciding import LONG, SIZES, add_waiting, measured_state
from tests.unit.controller.model_settings import settings


def test_request_without_a_group_leads_to_a_switch() -> None:
    state = measured_state()
    add_waiting(state, "long")
    decider = Decider(state)
    verdict = decider.decide(0.0)
    assert verdict.switch is not None
    assert verdict.switch is decider.last
    assert verdict.switch.layout.widest >= 2


def test_idle_server_stays_and_the_answer_is_kept() -> None:
    decider = Decider(measured_state())
    assert decider.decide(0.0) == Verdict()
    assert decider.last is not None
    assert not decider.last.is_made


@pytest.mark.parametrize("policy", ["static-dp", "static-tp"])
def test_fixed_layout_asks_no_policy(policy: str) -> None:
    decider = Decider(measured_state(policy))
    assert decider.decide(0.0) == Verdict()
    assert decider.last is None


def test_unmeasured_lanes_ask_no_policy() -> None:
    decider = Decider(ClusterState(settings("auto", 4)))
    assert decider.decide(0.0) == Verdict()
    assert decider.last is None


def test_server_without_engines_asks_no_policy() -> None:
    state = measured_state()
    state.layout = state.layout.without({0, 1, 2, 3})
    decider = Decider(state)
    assert decider.decide(0.0) == Verdict()
    assert decider.last is None


def test_dry_run_keeps_each_switch_once() -> None:
    state = measured_state(dry_run=True)
    add_waiting(state, "long")
    decider = Decider(state)
    for now_s in (0.0, 0.1):
        assert decider.decide(now_s) == Verdict()
    assert [decision.layout for decision in decider.dry_run] == [decider.dry_run[0].layout]


def test_urgent_arrival_is_worth_asking() -> None:
    urgent = RequestState("a", RequestSpec(10, 20, 10, priority=-1), SIZES, 1, 0.0)
    assert Decider(measured_state()).is_worth_asking(urgent)


def test_arrival_that_has_a_group_is_not_worth_asking() -> None:
    request = RequestState("a", RequestSpec(10, 20, 10), SIZES, 1, 0.0)
    assert not Decider(measured_state()).is_worth_asking(request)


@pytest.mark.parametrize(("waiting", "is_worth"), [(2, True), (3, False)])
def test_arrival_that_waits_is_worth_asking_in_a_short_queue(waiting: int, is_worth: bool) -> None:
    state = measured_state()
    requests = [add_waiting(state, str(number)) for number in range(waiting)]
    assert Decider(state).is_worth_asking(requests[-1]) == is_worth


def test_arrival_beside_a_wide_request_is_not_worth_asking() -> None:
    state = measured_state()
    request = add_waiting(state, "waits")
    runs = RequestState("runs", LONG, (2, 4), 9, 0.0)
    state.layout = state.layouts[-1]
    state.loads.add(runs, state.layout.groups[0], 151.0)
    assert not Decider(state).is_worth_asking(request)
