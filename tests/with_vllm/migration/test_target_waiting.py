"""Arriving requests that wait for blocks or an offer, and those that end or leave on the way."""

import pytest
from vllm.v1.request import RequestStatus

from flying_serving.layout.groups import Group, KVSource
from flying_serving.migration.migrations import OFFER_POLL_S
from flying_serving.migration.source import RunningOffer
from flying_serving.migration.target import BLOCKS_WAIT_S, OPENING_S
from flying_serving.wire import MigrationCounts
from tests.with_vllm.migration.two_engines import (
    BOTH,
    CLOSED,
    NOTHING,
    A,
    B,
    again,
    all_free,
    begin,
    node,
    run_out,
    settle,
)
from tests.with_vllm.vllm_adapter.kv_lanes import make

# ---- who waits


def test_requests_wait_where_blocks_are_missing() -> None:
    """The engine is asked for blocks, and tries again; those who come later wait behind, in that
    lane.
    """
    at = node({B: 8})
    taken = at.lanes[B].pool.take(6)
    for number, name in enumerate("ab", 5):
        before = begin(at, A, name, family=number)
        at.at(A).retain(name, number)
        at.expect(again(before, f"{name}+1"), B, KVSource(A, number))
    before = begin(at, A, "c")
    at.at(A).retain("c", 7)
    at.expect(again(before, "c+1"), BOTH, KVSource(A, 7))
    settle(at)
    settle(at, limit_s=1.0)
    assert at.asked == [(1, 3)]
    assert at.lanes[B].free() == 0
    assert at.at(B).retry_in_s(at.now_s) == OFFER_POLL_S
    assert list(at.lanes[BOTH].scheduler.requests) == ["c+1"]
    at.lanes[B].pool.give(taken)
    at.now_s += BLOCKS_WAIT_S / 2
    settle(at)
    assert list(at.lanes[B].scheduler.requests) == ["a+1"]
    for _ in range(8):
        at.step(B)
    settle(at)
    assert at.at(B).incoming.counts() == MigrationCounts(2, 24, 0)


def test_no_block_is_asked_for_while_a_chunk_is_on_its_way() -> None:
    """Its owner has none to lend before the chunk is here, and would be asked again only after a
    while.
    """
    at = node({BOTH: 2})
    at.at(BOTH).target.chunks.blocks = 2
    for number, (name, owner) in enumerate((("a", A), ("b", B)), 5):
        before = begin(at, owner, name, family=number)
        at.at(owner).retain(name, number)
        at.expect(again(before, f"{name}+1"), BOTH, KVSource(owner, number))
    for _ in range(2):
        at.at(BOTH).advance(at.now_s, None)
    assert any(arrival.writers for arrival in at.at(BOTH).incoming.by_id.values())
    assert at.lanes[BOTH].free() == 0
    assert at.asked == []
    settle(at)
    at.at(BOTH).advance(at.now_s, None)
    assert {size for size, _ in at.asked} == {2}


def test_a_request_that_has_waited_long_is_prefilled() -> None:
    """Its old group is told; who came later waits on; who is pulled ahead holds up nobody."""
    at = node()
    taken = at.lanes[B].pool.take(19)
    at.at(A).source.offer("other", RunningOffer(4, 1, early=True))
    begin(at, A, "other", family=4)
    at.expect(make("ahead", 4, 10, 20), B, KVSource(A, 4), 30)
    before = begin(at, A)
    at.at(A).retain("a", 5)
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    settle(at)
    assert at.asked == [(1, 8), (1, 4)]
    at.now_s += BLOCKS_WAIT_S
    later = begin(at, A, "b", family=5)
    at.at(A).retain("b", 6)
    at.expect(again(later, "b+1"), B, KVSource(A, 6))
    settle(at)
    assert list(at.at(B).incoming.by_id) == ["ahead", "a+1", "b+1"]
    assert at.at(B).incoming.counts() == NOTHING
    at.now_s += 0.01
    settle(at)
    assert list(at.at(B).incoming.by_id) == ["ahead", "b+1"]
    assert at.at(B).incoming.counts() == MigrationCounts(0, 0, 1)
    assert list(at.at(A).source.retained) == [6]
    at.lanes[B].pool.give(taken)


def test_an_offer_that_is_never_made_is_not_awaited_for_ever() -> None:
    """A request then runs without; one that is pulled ahead gives its blocks back."""
    at = node()
    at.expect(make("a+1", 3, 9, 2), B, KVSource(A, 5))
    at.expect(make("ahead", 4, 9, 20), B, KVSource(A, 6), 12)
    at.now_s += OPENING_S
    settle(at)
    assert len(at.at(B).incoming.by_id) == 2
    at.now_s += 0.1
    settle(at)
    assert at.at(B).incoming.by_id == {}
    assert at.at(B).incoming.counts() == MigrationCounts(0, 0, 1)
    run_out(at)
    assert all_free(at)


def test_a_request_waits_for_more_kv_only_while_no_other_needs_its_blocks() -> None:
    """Its owner may wait for that one. It goes on with what is here."""
    at = node()
    at.at(A).source.offer("a", RunningOffer(5, 1, early=True))
    begin(at, A, steps=1)
    at.expect(make("a+1", 3, 10, 2), B, KVSource(A, 5))
    for _ in range(2):
        settle(at)
    assert at.at(B).incoming.by_id["a+1"].pulled_tokens == 8
    taken = at.lanes[B].pool.take(at.lanes[B].free())
    settle(at)
    assert at.at(B).incoming
    at.lanes[B].scheduler.add_request(make("b", 4, 10, 2))
    settle(at)
    assert at.at(B).incoming.counts() == MigrationCounts(1, 8, 0)
    assert list(at.lanes[B].scheduler.requests) == ["b", "a+1"]
    at.lanes[B].pool.give(taken)
    run_out(at)
    assert all_free(at)


# ---- who ends or leaves on the way


@pytest.mark.parametrize("new", [B, BOTH])
@pytest.mark.parametrize("when", ["before", "prepared", "pulling", "after"])
def test_a_request_that_ends_is_forgotten(new: Group, when: str) -> None:
    """Whenever its client goes; members that still write finish first, and both groups let go."""
    at = node()
    before = begin(at, A)
    if when != "prepared":
        at.at(A).retain("a", 5)
    at.expect(again(before, "a+1"), new, KVSource(A, 5))
    if when != "before":
        at.at(new).advance(at.now_s, None)
    if when == "after":
        settle(at)
    at.abort("other", new)
    at.abort("a+1", new)
    if when == "pulling" and new == BOTH:
        assert at.lanes[new].free() < at.lanes[new].pool.total
    settle(at)
    assert not at.at(new).incoming
    assert at.lanes[new].free() == at.lanes[new].pool.total
    if when == "prepared":
        at.at(A).retain("a", 5)
    assert at.at(A).source.retained == {}
    assert at.lanes[new].scheduler.requests == {}
    assert all_free(at)


@pytest.mark.parametrize("pulled", [0, 5, 12])
def test_a_forwarded_request_takes_its_kv_along(pulled: int) -> None:
    """As much of it as had come; the third group gets it."""
    at = node()
    before = begin(at, A)
    at.at(A).retain("a", 5)
    at.at(B).target.chunks.token_s = {1: 1.0}
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    if pulled:
        at.at(B).advance(at.now_s, float(pulled))
    at.at(B).source.offer("a+1", RunningOffer(6, 1, early=True))
    at.at(B).retain("a+1", 7)
    assert at.at(B).source.running == {}
    at.expect(again(before, "a+2"), BOTH, KVSource(B, 7))
    settle(at)
    settle(at)
    assert at.at(BOTH).incoming.counts() == (
        MigrationCounts(1, pulled, 0) if pulled else MigrationCounts(0, 0, 1)
    )
    assert at.at(A).source.retained == {}
    assert at.at(B).source.retained == {}
    run_out(at)
    assert all_free(at)


def test_a_request_that_leaves_while_members_write_is_kept_after_that() -> None:
    """With what they have written."""
    at = node()
    before = begin(at, B)
    at.at(B).retain("a", 5)
    at.expect(again(before, "a+1"), BOTH, KVSource(B, 5))
    at.at(BOTH).advance(at.now_s, None)
    at.at(BOTH).retain("a+1", 6)
    assert at.read(KVSource(BOTH, 6)) is None
    settle(at)
    found = at.read(KVSource(BOTH, 6))
    assert found is not None
    assert found.tokens == 12
    assert found.is_final
    at.expect(again(before, "a+2"), A, KVSource(BOTH, 6))
    settle(at)
    assert at.at(A).incoming.counts() == MigrationCounts(1, 12, 0)
    run_out(at)
    assert all_free(at)


# ---- a group that loses a member


@pytest.mark.parametrize("after", ["is retained", "arrives", "is being written", "is pulled ahead"])
def test_a_dissolved_group_leaves_no_kv(after: str) -> None:
    """Neither what leaves it nor what comes to it; other lanes of its engines keep theirs."""
    at = node()
    before, other = begin(at, BOTH), begin(at, A, "c", family=5)
    at.at(A).retain("c", 8)
    if after == "is retained":
        at.at(BOTH).retain("a", 5)
    else:
        at.at(BOTH).source.offer("a", RunningOffer(6, 2, early=True))
        at.at(BOTH).source.publish()
        source = KVSource(B, 5)
        made = begin(at, B, "b", family=4)
        at.at(B).retain("b", 5)
        ahead = 4 if after == "is pulled ahead" else None
        at.expect(again(made, "b+1"), BOTH, source, ahead)
        if after == "is being written":
            at.at(BOTH).advance(at.now_s, None)
            assert at.at(BOTH).is_pulling()
    at.at(BOTH).dissolve(2)
    at.lanes[BOTH].scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    at.inboxes[0].clear()
    at.inboxes[1].clear()
    assert at.lanes[BOTH].free() == at.lanes[BOTH].pool.total
    assert not at.at(BOTH).incoming.by_id and not at.at(BOTH).is_pulling()
    assert list(at.at(A).source.retained) == [8]
    for number in (5, 6):
        offer = at.read(KVSource(BOTH, number))
        assert offer is None or offer == CLOSED
    assert before.num_tokens == 13
    assert other.num_tokens == 13
