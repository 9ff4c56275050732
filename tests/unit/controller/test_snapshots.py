"""The policy's view of the state: the groups that requests need."""

import pytest

from flying_serving.controller.requests import RequestSpec
from flying_serving.controller.snapshots import required_groups
from flying_serving.controller.state import ClusterState
from tests.unit.controller.deciding import LONG, add_waiting, measured_state
from tests.unit.controller.model_settings import settings


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
    needs = required_groups(state, state.pool.firsts(), 0)
    assert [(need.least_size, need.crowded_out) for need in needs] == [(4, 0), (2, 2)]
    assert needs[1].reason == "context: no room for 2 requests of 2 engines beside others"
    state.crowded_out = {(2, 4), (4,)}
    needs = required_groups(state, state.pool.firsts(), 0)
    assert [(need.least_size, need.crowded_out) for need in needs] == [(4, 0), (2, 2), (4, 1)]
    for name in "ab":
        state.pool.remove(name)
    state.crowded_out = {(2, 4)}
    assert [need.crowded_out for need in required_groups(state, state.pool.firsts(), 0)] == [0]
