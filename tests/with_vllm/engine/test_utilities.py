"""EngineUtilities: what the API server's check of an engine reaches."""

import pytest

from flying_serving.engine.lane import EngineLanes
from flying_serving.engine.utilities import EngineUtilities
from flying_serving.errors import IntegrityError
from flying_serving.wire import ANSWERS, EngineMemory
from tests.with_vllm.engine.looping_node import LoopingNode
from tests.with_vllm.weights.lending.lending_pair import LendingPair, lent


def test_the_registry_lists_each_utility_of_an_engine() -> None:
    """An engine answers to no other name; `flying_leave` is of the engine process itself."""
    assert set(ANSWERS) == {name for name in dir(EngineUtilities) if name.startswith("flying_")}


def checked(engines: LendingPair) -> EngineUtilities:
    """Return the utilities of an engine with lanes of its own and the first engine's weights."""
    loop = LoopingNode(engines=1).engines[0].loop
    return EngineUtilities(engines.weights[0], EngineMemory(0, 0), loop, 0, [], [])


def test_the_check_passes_while_weights_are_whole_and_lent() -> None:
    assert checked(LendingPair()).flying_check()
    assert checked(lent()).flying_check()


def test_the_check_finds_pages_of_two_owners() -> None:
    """Weights that are said to be back while extra blocks still have their pages."""
    engines = lent()
    engines.weights[0].ledger.dropped = 1
    with pytest.raises(IntegrityError, match=r"^5 pages belong to weights and to KV$"):
        checked(engines).flying_check()


def test_the_check_finds_extra_blocks_that_no_weights_made_room_for() -> None:
    engines = LendingPair()
    pool = engines.pair.pools[0]
    pool.allow([max(pool.withheld)])
    with pytest.raises(
        IntegrityError, match="a lane has extra blocks whose pages belong to weights"
    ):
        checked(engines).flying_check()


def test_the_check_finds_a_block_that_is_free_and_lent() -> None:
    """Of the lanes themselves, weights or not."""
    utilities = checked(LendingPair())
    lanes: EngineLanes = utilities.loop.lanes
    lanes.own_pool.take(1)
    with pytest.raises(IntegrityError):
        utilities.flying_check()


def test_a_leader_counts_token_parallel_steps_of_its_groups_from_zero() -> None:
    """Of groups of several: one that has made none has a zero."""
    leader, member = (
        EngineUtilities(None, EngineMemory(0, 0), engine.loop, 0, [], [])
        for engine in LoopingNode().engines
    )
    assert leader.flying_metrics()["token_parallel"] == {2: 0}
    assert member.flying_metrics()["token_parallel"] == {}
    leader.loop.instruments.steps.token_parallel.update({1: 3, 2: 5})
    assert leader.flying_metrics()["token_parallel"] == {2: 5}
