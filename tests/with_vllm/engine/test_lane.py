"""Lanes: which of them have requests, of groups that this engine leads and of those that others
lead.
"""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from flying_serving.comm.board import StepBoard
from flying_serving.engine.lane import Lanes
from flying_serving.engine.messages import RunStep
from tests.with_vllm.engine.pairs import GROUP, Pair
from tests.with_vllm.engine.schedulers import BLOCK
from tests.with_vllm.protocol.client import Job, Retain
from tests.with_vllm.protocol.engine import Engine
from tests.with_vllm.protocol.settings import Overdue, Settings

NONE_OVERDUE = Overdue(arrivals=False, retained=False, weights=False)


@pytest.fixture
def boards(tmp_path: Path) -> Iterator[list[StepBoard]]:
    """Yield the ends of two engines of their board."""
    made = [StepBoard(f"{tmp_path}/board", 2) for _ in GROUP]
    yield made
    for board in made:
        board.close()


def lanes_of(pair: Pair, boards: list[StepBoard]) -> list[Lanes]:
    """Return the lanes of both engines; the first leads the group."""
    return [part.lanes(board) for part, board in zip(pair.parts, boards, strict=True)]


def begin(pair: Pair, lanes: list[Lanes]) -> None:
    """A request of the group makes its first step."""
    pair.scheduler.add("r", 2 * BLOCK, 4)
    pair.leader.order(0.0)
    pair.serve_all(0.0)
    pair.leader.order(0.0)
    pair.finish_step()
    lanes[0].note_loads()


def active(lanes: list[Lanes]) -> list[int]:
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


class Loops:
    """Two engines whose loops take turns, until nothing is left to serve; they share a board."""

    def __init__(self, boards: list[StepBoard]) -> None:
        self.engines = [
            Engine(number, Settings(blocks=6, engines=2, widest=2), mobile=("a",))
            for number in GROUP
        ]
        self.inboxes: list[deque[object]] = [deque() for _ in GROUP]
        for engine, board in zip(self.engines, boards, strict=True):
            engine.loop.lanes._board = board

    def go_on(self) -> None:
        """Each engine goes once through its loop; a step of the group follows when both have
        entered it.
        """
        for engine, inbox in zip(self.engines, self.inboxes, strict=True):
            is_step = bool(inbox) and isinstance(inbox[0], RunStep)
            message = inbox.popleft() if inbox and not is_step else None
            engine.go_on(message, 1, NONE_OVERDUE, ((),))  # type: ignore[arg-type]
            for members, sent in engine.channel.sent:
                for member in members:
                    self.inboxes[member].append(sent)
            engine.channel.sent = []
        if all(inbox and isinstance(inbox[0], RunStep) for inbox in self.inboxes):
            for engine, inbox in zip(self.engines, self.inboxes, strict=True):
                engine.step(inbox.popleft(), (), ())  # type: ignore[arg-type]


def test_a_member_sees_without_a_step_that_requests_have_left(boards: list[StepBoard]) -> None:
    loops = Loops(boards)
    leader, member = loops.engines
    leader.hear(Job("a", 2, 0, prompt=4, tokens=9))
    while not leader.schedulers[2].requests["a"].num_output_tokens:
        loops.go_on()
    leader.go_on(None, 0, NONE_OVERDUE, ((),))
    assert member.loop.lanes.active() == 1
    leader.hear(Retain("a", 1))
    leader.go_on(None, 0, NONE_OVERDUE, ((),))
    assert leader.loop.migrations.source.retained
    assert member.loop.lanes.active() == 0
