"""ClusterState: its sizes, its groups, and the equations that must hold between its books."""

from collections.abc import Callable

import pytest

from flying_serving.controller.requests import RequestSpec
from flying_serving.controller.state import ClusterState
from flying_serving.layout.groups import Layout
from flying_serving.parallelism import Parallelism
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.parallelism import TokenCost
from flying_serving.predict.steps import Step
from tests.unit.controller.model_settings import settings
from tests.unit.controller.model_shell import ModelShell

SHORT = RequestSpec(10, 30, 20)


def busy_state() -> ClusterState:
    """Return two engines with the requests "a" and "b", and "c" waiting."""
    shell = ModelShell(settings("manual", 2, max_num_seqs=1))
    for name in "abc":
        shell.arrive(name, SHORT)
    return shell.controller.state


def _wait_as_well(state: ClusterState) -> None:
    state.pool.add(state.started["a"])


def _run_unbooked(state: ClusterState) -> None:
    state.loads.remove(state.started["a"])


def _book_unstarted(state: ClusterState) -> None:
    del state.started["a"]


def _count_a_prompt_twice(state: ClusterState) -> None:
    state.loads[(0,)].prompts += 1


def _book_tokens_for_none(state: ClusterState) -> None:
    state.loads[(0,)].committed_tokens += 1


def _keep_a_lost_engine(state: ClusterState) -> None:
    state.absent_engines.add(1)


DAMAGES = {
    _wait_as_well: r"wait and run: \{'a'\}",
    _run_unbooked: "booked .* but running",
    _book_unstarted: "booked .* but running",
    _count_a_prompt_twice: "'prompts': 2.* have .*'prompts': 1",
    _book_tokens_for_none: "1.0 tokens are booked for no request",
    _keep_a_lost_engine: r"\{1\} are lost",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_books_are_reported(damage: Callable[[ClusterState], None]) -> None:
    state = busy_state()
    state.check_integrity()
    damage(state)
    with pytest.raises(AssertionError, match=DAMAGES[damage]):
        state.check_integrity()


def test_open_requests_are_the_waiting_and_the_running() -> None:
    assert busy_state().open_requests == ["c", "a", "b"]


def test_request_that_waits_has_no_group() -> None:
    state = busy_state()
    assert state.group_of("a") == (0,)
    assert state.group_of("c") is None


def test_requests_of_ended_groups_are_outside() -> None:
    assert busy_state().outside(Layout.uniform(2, 2)) == {"a", "b"}


def test_layout_to_restore_has_sizes_ahead() -> None:
    state = busy_state()
    assert state.sizes_ahead == {1}
    state.to_restore = Layout.uniform(2, 2)
    assert state.sizes_ahead == {1, 2}


def test_lanes_are_of_sizes_that_were_measured() -> None:
    assert ClusterState(settings("manual", 2)).lane_figures() == {}
    assert set(busy_state().lane_figures()) == {1, 2}


def test_lanes_may_be_token_parallel_if_such_steps_were_measured() -> None:
    state = busy_state()
    assert {lane.token_cost for lane in state.lane_figures().values()} == {None}
    state.steps.calibrate([Step(2, 0.02, 64, 0, 0, parallelism=Parallelism.TOKEN)])
    assert state.lane_figures()[2].token_cost == TokenCost.of(state.steps, 2)
    assert state.lane_figures()[2].token_cost is not None
    assert state.lane_figures()[1].token_cost is None


def test_lane_without_migration_cost_cannot_pull() -> None:
    state = busy_state()
    state.migrates = {2: MigrationCost(0.001, 1e-6)}
    assert state.lane_figures()[2].migration == MigrationCost(0.001, 1e-6)


def test_each_offer_has_a_number_of_its_own() -> None:
    state = busy_state()
    assert state.new_offer((0,)) != state.new_offer((0,))
