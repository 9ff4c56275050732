"""What a pool says of requests whose blocks vLLM's schedulers free, and of those that come with KV,
step by step.
"""

from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from tests.with_vllm.engine.schedulers import Hooks
from tests.with_vllm.vllm_adapter.kv_lanes import BLOCK, KVLane, make

PROMPT = 10


class Told:
    """What is said of requests, each with what it has at that time."""

    def __init__(self, lane: KVLane) -> None:
        self._lane = lane
        self.all: list[tuple[str, Any]] = []
        self.blocks: list[list[int]] = []
        self.computed: list[int] = []
        self.tokens: list[int] = []
        lane.scheduler.hooks = Hooks(blocks_freed=self._freed)

    def _freed(self, request: Request) -> None:
        free = self._lane.free()
        blocks = self._lane.pool.blocks_of(request.request_id)
        assert all(self._lane.pool._pool.blocks[block].ref_cnt == 1 for block in blocks)
        assert free == self._lane.pool.total - len(self._lane.pool.requests_own())
        self.all.append((request.request_id, request.status if request.is_finished() else None))
        self.blocks.append(blocks)
        self.computed.append(request.num_computed_tokens - request.num_in_flight_tokens)
        self.tokens.append(request.num_tokens)


@pytest.mark.parametrize("how", ["length", "stop"])
def test_a_request_that_ends_has_kv_of_all_but_its_last_token(overlaps: bool, how: str) -> None:
    """In blocks that are still its own, though a step may be under way that computes one more."""
    lane = KVLane(overlaps=overlaps)
    told = Told(lane)
    end = PROMPT + 5
    outputs, stop_at = (6, None) if how == "length" else (40, end)
    lane.scheduler.add_request(make("a", 3, PROMPT, outputs, stop_at=stop_at))
    while not told.all:
        lane.step()
    status = (
        RequestStatus.FINISHED_LENGTH_CAPPED if how == "length" else RequestStatus.FINISHED_STOPPED
    )
    assert told.all == [("a", status)]
    assert told.tokens == [end + 1]
    assert told.computed == [end]
    assert lane.has(3, told.blocks[0], range(end))
    lane.settle()
    assert lane.scheduler.requests == {}
    assert lane.free() == lane.pool.total
    assert len(told.all) == 1


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_request_that_is_aborted_is_told_with_its_blocks(overlaps: bool, steps: int) -> None:
    """In the middle of its prompt or later; what is under way does not count."""
    lane = KVLane(overlaps=overlaps)
    told = Told(lane)
    lane.scheduler.add_request(make("a", 3, PROMPT, 40))
    for _ in range(steps):
        lane.step()
    lane.abort("a", "unknown")
    assert told.all == [("a", RequestStatus.FINISHED_ABORTED)]
    assert len(told.blocks[0]) > 0
    assert told.computed[0] < told.tokens[0]
    assert lane.has(3, told.blocks[0], range(told.computed[0]))
    lane.settle()
    assert told.all == [("a", RequestStatus.FINISHED_ABORTED)]
    assert lane.free() == lane.pool.total


def test_one_that_waits_is_told_without_blocks(overlaps: bool) -> None:
    """It is over before it has begun."""
    lane = KVLane(overlaps=overlaps)
    told = Told(lane)
    lane.scheduler.add_request(make("a", 3, PROMPT, 4))
    lane.abort("a")
    assert told.all == [("a", RequestStatus.FINISHED_ABORTED)]
    assert told.blocks == [[]]


@pytest.mark.parametrize("by", ["blocks", "reset"])
def test_a_preempted_request_is_told_while_it_runs(overlaps: bool, by: str) -> None:
    """It has not ended, and all its blocks are there; when it ends after that it is told again."""
    lane = KVLane(overlaps=overlaps, blocks=11)
    told = Told(lane)
    for name, family in (("a", 3), ("b", 5)):
        lane.scheduler.add_request(make(name, family, PROMPT, 18))
    for _ in range(4):
        lane.step()
    if by == "reset":
        lane.settle()
        assert lane.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert told.all == [("b", None), ("a", None)]
    while lane.scheduler.requests:
        lane.step()
    lane.settle()
    assert ("b", None) in told.all
    assert {
        name for name, status in told.all if status == RequestStatus.FINISHED_LENGTH_CAPPED
    } == {"a", "b"}
    for (name, _), blocks, computed in zip(told.all, told.blocks, told.computed, strict=True):
        assert len(blocks) >= -(-computed // BLOCK) > 0, name
    lane.pool.check(set())


def test_lane_short_of_blocks_counts_running_then_waiting_requests(overlaps: bool) -> None:
    """What runs, once a step would preempt a request; if nothing runs, what waits."""
    lane = KVLane(overlaps=overlaps, blocks=6)
    assert not lane.pool.is_short()
    taken = lane.pool.take(3)
    assert [lane.pool.missing_for(tokens) for tokens in (0, 7, 8, 11, 12)] == [0, 0, 1, 1, 2]
    lane.scheduler.add_request(make("a", 3, PROMPT, 8))
    assert lane.pool.is_short()
    lane.pool.give(taken[:1])
    lane.step()
    lane.settle()
    assert [request.request_id for request in lane.scheduler.running] == ["a"]
    assert not lane.pool.is_short()
    while not lane.pool.is_short():
        lane.step()
        lane.settle()
    assert lane.scheduler.requests["a"].num_tokens == 13
    assert lane.free() == 0
    lane.pool.give(taken[1:])
    assert not lane.pool.is_short()


# ---- requests that come with KV


def run_out(lane: KVLane) -> None:
    """Until nothing is left."""
    for _ in range(100):
        if not lane.scheduler.requests:
            lane.settle()
            return
        lane.step()
        lane.pool.check(set())
    raise AssertionError("it does not end")


@pytest.mark.parametrize("cached", [0, 8])
@pytest.mark.parametrize("arrived", [13, 11, 9])
def test_a_request_pulled_ahead_runs_in_the_blocks_set_aside(
    overlaps: bool, cached: int, arrived: int
) -> None:
    """Prepared with its prompt; the request itself is another object with the same id, its outputs
    as history.
    """
    lane = KVLane(overlaps=overlaps)
    if cached:
        lane.scheduler.add_request(make("before", 3, cached + 1, 1))
        run_out(lane)
    ahead = make("a", 3, PROMPT, 20)
    room = lane.pool.prepare(ahead, 13)
    assert room is not None
    start, blocks = room
    assert start == cached
    assert len(blocks) == 4
    assert lane.has(3, blocks, range(start))
    lane.pool.check(set())
    other = make("other", 5, PROMPT, 9)
    lane.scheduler.add_request(other)
    for _ in range(3):
        lane.step()
    lane.write(3, blocks, range(start, arrived))
    itself = make("a", 3, PROMPT, 6, had=4)
    lane.pool.arrived(itself, arrived)
    lane.scheduler.add_request(itself)
    lane.plans.clear()
    told = Told(lane)
    while not lane.plans or "a" not in lane.plans[-1].num_scheduled_tokens:
        lane.step()
    (new,) = lane.plans[-1].scheduled_new_reqs
    assert new.req_id == "a"
    assert new.block_ids == (blocks,)
    assert new.num_computed_tokens == arrived
    assert lane.plans[-1].num_scheduled_tokens["a"] == 14 - arrived
    while not told.all:
        lane.step()
    assert told.all == [("a", RequestStatus.FINISHED_LENGTH_CAPPED)]
    assert told.blocks == [blocks]
    assert lane.has(3, blocks, range(15))
    run_out(lane)
    assert itself.num_tokens == 16
    assert lane.free() == lane.pool.total
    assert lane.pool.prepare(make("after", 3, PROMPT, 9, had=4), 13) == (
        12,
        [*blocks[:3], lane.pool.blocks_of("after")[3]],
    )


@pytest.mark.parametrize("which", ["ahead", "itself"])
def test_prefetched_kv_may_be_released(overlaps: bool, which: str) -> None:
    """By the request as it arrived first, or by the one that is to run; it is then prefilled like
    any other.
    """
    lane = KVLane(overlaps=overlaps)
    ahead, itself = make("a", 3, PROMPT, 20), make("a", 3, PROMPT, 6, had=4)
    assert lane.pool.prepare(ahead, 13) is not None
    lane.pool.release(ahead if which == "ahead" else itself)
    assert lane.free() == lane.pool.total
    assert lane.pool.requests_own() == set()
    lane.scheduler.add_request(itself)
    run_out(lane)
    assert itself.num_tokens == 16
    assert lane.free() == lane.pool.total


def test_blocks_ahead_are_enough_for_the_next_step(overlaps: bool) -> None:
    """However many tokens come, and though no other block is free."""
    for tokens in range(1, 3 * BLOCK + 1):
        lane = KVLane(overlaps=overlaps, blocks=-(-(tokens + 1) // BLOCK) + 1)
        ahead = make("a", 3, 1, 20)
        room = lane.pool.prepare(ahead, tokens)
        assert room is not None
        assert lane.free() == 0
        itself = make("a", 3, 1, tokens + 1, had=tokens)
        lane.pool.arrived(itself, tokens)
        lane.scheduler.add_request(itself)
        run_out(lane)
        assert itself.num_tokens == tokens + 2
        assert lane.free() == lane.pool.total
