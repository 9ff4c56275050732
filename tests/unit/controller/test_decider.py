"""Decider: when the policy is asked, and which answers are kept."""

import pytest

from flying_serving.controller.decider import Decider, Verdict
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.snapshots import required_groups
from flying_serving.controller.state import ClusterState
from tests.unit.controller.model_settings import settings
from tests.unit.policy.costs import costs, measured

LONG = RequestSpec(150, 151, 1)
SIZES = (1, 2, 4)


def measured_state(policy: str = "auto", *, dry_run: bool = False) -> ClusterState:
    """Return four engines that are faster alone than in groups, with two requests at most in a
    group.
    """
    state = ClusterState(settings(policy, 4, max_num_seqs=2, dry_run=dry_run))
    state.steps.calibrate(measured(costs(SIZES, fixed=2.0, rest=1.5)))
    return state


def add_waiting(state: ClusterState, name: str, spec: RequestSpec = LONG) -> RequestState:
    """Return a request that is in the task pool now."""
    sizes = state.settings.capacity.sizes(spec)
    request = RequestState(name, spec, sizes, len(state.pool), 0.0)
    state.pool.add(request)
    return request


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


@pytest.mark.parametrize(("engines", "size"), [(2, 2), (4, 2)])
def test_urgent_request_needs_the_widest_group_beside_others_or_all(
    engines: int, size: int
) -> None:
    needs = required_groups(ClusterState(settings("auto", engines)), [], 1)
    assert [(need.least_size, need.urgent) for need in needs] == [(size, True)]


def test_all_long_requests_that_find_no_room_need_another_group() -> None:
    """By their least size, not by that of a longer one which has its group."""
    state = measured_state("gyges")
    for name, spec in (("a", LONG), ("b", LONG), ("longest", RequestSpec(250, 251, 1))):
        add_waiting(state, name, spec)
    add_waiting(state, "degree", RequestSpec(150, 151, 1, degree=2))
    state.crowded_out = {(2, 4)}
    needs = required_groups(state, state.pool.first_of_each_kind(), 0)
    assert [(need.least_size, need.crowded_out) for need in needs] == [(4, 0), (2, 2)]
    assert needs[1].reason == "context: no room for 2 requests of 2 engines beside others"
    state.crowded_out = {(2, 4), (4,)}
    needs = required_groups(state, state.pool.first_of_each_kind(), 0)
    assert [(need.least_size, need.crowded_out) for need in needs] == [(4, 0), (2, 2), (4, 1)]
    for name in "ab":
        state.pool.remove(name)
    state.crowded_out = {(2, 4)}
    assert [
        need.crowded_out for need in required_groups(state, state.pool.first_of_each_kind(), 0)
    ] == [0]
