"""What stays offered of a request that leaves while it is offered, or has just ended."""

from functools import partial
from typing import Any

import pytest

from flying_serving.migration.offers import OfferTable
from flying_serving.migration.source import YIELD_S, RunningOffer, Source
from tests.with_vllm.engine.schedulers import Hooks
from tests.with_vllm.vllm_adapter.kv_lanes import BLOCK, KVLane, make

NUMBER, NEXT = 7, 8
PROMPT = 10


class Owner:
    """An engine with a lane of its own, which offers the KV of a request there."""

    def __init__(self, outputs: int, stop_at: int | None = None) -> None:
        self.lane = KVLane(overlaps=False)
        self.table = OfferTable(memoryview(bytearray(OfferTable.size_bytes(20, 40))), 20, 40)
        self.source = Source({1: self.lane.pool}, self.table)
        self.lane.scheduler.hooks = Hooks(blocks_freed=partial(self.source.blocks_freed, 1))
        self.source.offer("a", RunningOffer(NUMBER, 1, early=True))
        self.lane.scheduler.add_request(make("a", 3, PROMPT, outputs, stop_at=stop_at))

    def step(self) -> None:
        """A step of its lane."""
        self.lane.step()
        self.source.publish()

    def offered(self, number: int) -> tuple[int, bool] | None:
        """How many tokens, each with its KV, and whether no more come."""
        offer = self.table.read(number)
        if offer is None:
            return None
        assert self.lane.has(3, list(offer.blocks), range(offer.tokens))
        return offer.tokens, offer.is_final


@pytest.mark.parametrize("number", [NUMBER, NEXT])
def test_kv_of_a_leaving_request_stays_offered(number: int) -> None:
    """Under the number under which it was offered, as a prefix that is not waited for, or under
    another.
    """
    owner = Owner(outputs=20)
    for _ in range(3):
        owner.step()
    before = owner.offered(NUMBER)
    assert before is not None and not before[1]
    owner.source.retain("a", number)
    assert owner.offered(number) == (before[0], True)
    assert number == NUMBER or owner.offered(NUMBER) == (0, True)
    assert owner.lane.scheduler.requests == {}
    owner.source.release(number)
    assert owner.lane.free() == owner.lane.pool.total


def test_a_request_that_has_just_ended_stays_offered_when_it_is_to_leave() -> None:
    """It was told to before the API server knew of its end."""
    owner = Owner(outputs=1)
    while owner.lane.scheduler.requests:
        owner.step()
    assert owner.offered(NUMBER) == (PROMPT, True)
    owner.source.retain("a", NUMBER)
    assert owner.offered(NUMBER) == (PROMPT, True)


def test_stopped_request_offers_no_kv() -> None:
    """It goes on nowhere, so its blocks are free at once."""
    owner = Owner(outputs=20, stop_at=PROMPT + 3)
    while owner.lane.scheduler.requests:
        owner.step()
    assert owner.offered(NUMBER) == (0, True)
    assert owner.source.retained == {}
    assert owner.lane.free() == owner.lane.pool.total


def test_unknown_request_offers_no_kv() -> None:
    owner = Owner(outputs=20)
    owner.source.retain("b", NEXT)
    assert owner.offered(NEXT) == (0, True)


# ---- KV that is kept, and requests that need its blocks


class Keeper:
    """An engine whose requests have left its lane one after the other: numbers 1, 2 and so on, with
    four blocks each.

    `blocks`: of the lane, the null block among them.
    """

    def __init__(self, count: int, blocks: int) -> None:
        self.lane = KVLane(overlaps=False, blocks=blocks)
        self.table = OfferTable(memoryview(bytearray(OfferTable.size_bytes(20, 40))), 20, 40)
        self.source = Source({1: self.lane.pool}, self.table)
        self.lane.scheduler.hooks = Hooks(blocks_freed=partial(self.source.blocks_freed, 1))
        for number in range(1, count + 1):
            self.lane.scheduler.add_request(make(str(number), number, 4 * BLOCK, 9))
            for _ in range(3):
                self.lane.step()
            self.source.retain(str(number), number)
        self.source.advance(0.0)

    def offered(self) -> list[int]:
        """Numbers that are offered and kept."""
        found = [
            number
            for number in range(1, 9)
            if (offer := self.table.read(number)) is not None and offer.tokens
        ]
        assert sorted(self.source.retained) == found
        return found


def test_retained_kv_of_an_aborted_request_is_freed_at_once() -> None:
    """It has left, and waits to go on elsewhere, when its client goes away; or it has ended where
    no other goes on.
    """
    keeper = Keeper(3, 20)
    assert keeper.offered() == [1, 2, 3]
    keeper.source.abort(["1", "3", "another"])
    assert keeper.offered() == [2]


def test_retained_kv_yields_to_a_waiting_request() -> None:
    """No more of it than the request needs, and the last first: the others are pulled before."""
    keeper = Keeper(4, 20)
    keeper.lane.scheduler.add_request(make("new", 9, 3 * BLOCK, 2))
    keeper.source.advance(0.0)
    assert keeper.offered() == [1, 2, 3]
    keeper.lane.step()
    assert [one.request_id for one in keeper.lane.scheduler.running] == ["new"]


def test_retained_kv_stays_while_its_blocks_are_not_needed() -> None:
    keeper = Keeper(3, 20)
    keeper.lane.scheduler.add_request(make("new", 9, 2 * BLOCK, 2))
    for _ in range(3):
        keeper.source.advance(1.0)
        keeper.lane.step()
    assert keeper.offered() == [1, 2, 3]


def test_retained_kv_stays_if_the_waiting_request_may_not_run_yet() -> None:
    """Four run, and so many may."""
    keeper = Keeper(1, 20)
    for name in ("w", "x", "y", "z", "waits"):
        keeper.lane.scheduler.add_request(make(name, 9, 2 if name != "waits" else 8 * BLOCK, 9))
    keeper.lane.step()
    assert len(keeper.lane.scheduler.running) == 4
    keeper.lane.pool.take(keeper.lane.free())
    keeper.source.advance(0.0)
    assert keeper.offered() == [1]


def test_retained_kv_yields_only_to_requests_that_may_start() -> None:
    """Three of four run, so one more may; there is room for it, though not for all that wait."""
    keeper = Keeper(3, 24)
    for name in ("x", "y", "z"):
        keeper.lane.scheduler.add_request(make(name, 9, 2, 9))
    keeper.lane.step()
    for name in ("first", "second", "third"):
        keeper.lane.scheduler.add_request(make(name, 8, 3 * BLOCK, 2))
    keeper.source.advance(0.0)
    assert keeper.offered() == [1, 2, 3]
    keeper.lane.step()
    assert [one.request_id for one in keeper.lane.scheduler.running] == ["x", "y", "z", "first"]


@pytest.mark.parametrize("kept", [False, True])
def test_blocks_that_lane_1_lacks_are_counted_only_while_it_keeps_some(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while another lane does: to count them is to look at each request, on each turn of the
    loop.
    """
    keeper, group = Keeper(int(kept), 20), KVLane(overlaps=False)
    source = keeper.source if kept else Source({1: keeper.lane.pool, 2: group.pool}, keeper.table)
    if not kept:
        group.scheduler.add_request(make("a", 3, PROMPT, 9))
        group.step()
        source.retain("a", NUMBER)
        assert NUMBER in source.retained
    keeper.lane.scheduler.add_request(make("new", 9, 2 * BLOCK, 2))
    looked_at: list[str] = []
    coordinator = keeper.lane.scheduler.kv_cache_manager.coordinator
    look = coordinator.get_blocks

    def noted(request_id: str) -> Any:
        looked_at.append(request_id)
        return look(request_id)

    monkeypatch.setattr(coordinator, "get_blocks", noted)
    source.advance(0.0)
    assert looked_at == (["new"] if kept else [])


def test_kv_that_is_being_pulled_yields_last() -> None:
    """When nothing came of that for a while."""
    keeper = Keeper(2, 20)
    keeper.source.release(2, 2 * BLOCK)
    keeper.source.advance(0.0)
    assert keeper.source.yield_blocks(1, 0.0)
    assert keeper.offered() == [2]
    assert not keeper.source.yield_blocks(1, YIELD_S / 2)
    assert keeper.source.yield_blocks(1, 2 * YIELD_S)
    assert keeper.offered() == []
    assert not keeper.source.yield_blocks(1, 3 * YIELD_S)
    assert keeper.lane.free() == keeper.lane.pool.total


def test_retained_kv_yields_to_requests_of_its_own_lane() -> None:
    """That of another lane stays, whichever was retained first."""
    own, group = KVLane(overlaps=False), KVLane(overlaps=False)
    table = OfferTable(memoryview(bytearray(OfferTable.size_bytes(20, 40))), 20, 40)
    source = Source({1: own.pool, 2: group.pool}, table)
    for number, lane in enumerate((group, own, group), 1):
        lane.scheduler.add_request(make(str(number), number, PROMPT, 9))
        lane.step()
        source.retain(str(number), number)
    assert list(source.retained) == [1, 2, 3]
    assert source.yield_blocks(1, 0.0)
    assert list(source.retained) == [1, 3]
    assert not source.yield_blocks(1, 0.0)
    assert source.yield_blocks(2, 0.0)
    assert list(source.retained) == [1]
