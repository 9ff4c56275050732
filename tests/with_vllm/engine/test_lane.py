"""Lanes: which of them have requests, of groups that this engine leads and of those that others
lead.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from flying_serving.comm.board import StepBoard
from flying_serving.engine.lane import EngineLanes
from tests.with_vllm.engine.looping_node import LoopingNode
from tests.with_vllm.engine.pairs import GROUP, Pair
from tests.with_vllm.engine.schedulers import BLOCK
from tests.with_vllm.vllm_adapter.kv_lanes import make


@pytest.fixture
def boards(tmp_path: Path) -> Iterator[list[StepBoard]]:
    """Yield the ends of two engines of their board."""
    made = [StepBoard(f"{tmp_path}/board", 2) for _ in GROUP]
    yield made
    for board in made:
        board.close()


def lanes_of(pair: Pair, boards: list[StepBoard]) -> list[EngineLanes]:
    """Return the lanes of both engines; the first leads the group."""
    return [part.lanes(board) for part, board in zip(pair.parts, boards, strict=True)]


def begin(pair: Pair, lanes: list[EngineLanes]) -> None:
    """A request of the group makes its first step."""
    pair.scheduler.add("r", 2 * BLOCK, 4)
    pair.leader.plan_step(0.0)
    pair.serve_all(0.0)
    pair.leader.plan_step(0.0)
    pair.finish_step()
    lanes[0].note_loads()


def active(lanes: list[EngineLanes]) -> list[int]:
    """Return how many lanes of each engine have requests, as it sees it."""
    return [each.active() for each in lanes]


def test_lanes_with_requests_are_active_on_every_member_of_their_group(
    boards: list[StepBoard],
) -> None:
    pair = Pair(lend_blocks=5)
    lanes = lanes_of(pair, boards)
    assert active(lanes) == [0, 0]
    begin(pair, lanes)
    assert active(lanes) == [1, 1]
    pair.own[1].add("local", BLOCK, 2)
    pair.own[1].schedule()
    assert active(lanes) == [1, 2]


def test_a_lane_whose_requests_have_left_is_active_on_no_member(boards: list[StepBoard]) -> None:
    """Without a step, and though their KV is kept for other groups to pull."""
    pair = Pair(lend_blocks=5)
    lanes = lanes_of(pair, boards)
    begin(pair, lanes)
    pair.leader.pool.pin("r")
    pair.scheduler.finish_requests(["r"], RequestStatus.FINISHED_ABORTED)
    lanes[0].note_loads()
    assert pair.members[1].lent.lent_count
    assert active(lanes) == [0, 0]


def test_a_lane_whose_leader_is_lost_is_not_active(boards: list[StepBoard]) -> None:
    """It cannot note any more that nothing runs."""
    pair = Pair(lend_blocks=5)
    lanes = lanes_of(pair, boards)
    begin(pair, lanes)
    pair.members[1].dissolve()
    assert active(lanes)[1] == 0


def test_a_member_sees_without_a_step_that_requests_have_left() -> None:
    node = LoopingNode(overlaps=False)
    leader, member = node.engines
    node.add(make("a", 3, 4, 9), 2)
    node.run_until_tokens("a", 1)
    node.run_until_outstanding(0)
    assert member.loop.lanes.active() == 1
    launched = member.worker.launched
    leader.loop.migrations.retain("a", 1)
    leader.run()
    assert leader.loop.migrations.source.retained
    assert member.worker.launched == launched
    assert member.loop.lanes.active() == 0
