"""KV that a group retains for others: how long it stays, and what part of it counts."""

import pytest

from flying_serving.layout.groups import Group, KVSource
from flying_serving.migration.offers import Offer
from flying_serving.migration.source import RETAIN_S, RunningOffer
from flying_serving.migration.target import BLOCKS_WAIT_S
from flying_serving.wire import MigrationCounts
from tests.with_vllm.migration.migrating_node import GROUPS, MigratingNode
from tests.with_vllm.migration.two_engines import (
    BOTH,
    CLOSED,
    PAIRS,
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


def test_kv_that_is_not_fetched_is_released() -> None:
    """In time; the engine knows when to look, and who comes later is prefilled at once."""
    at = node()
    begin(at, A, "a")
    begin(at, A, "b", family=4)
    at.at(A).retain("a", 5)
    settle(at)
    assert at.at(A).retry_in_s(at.now_s) == RETAIN_S
    at.now_s += 2.0
    at.at(A).retain("b", 6)
    settle(at)
    assert at.at(A).retry_in_s(at.now_s) == RETAIN_S - 2.0
    at.now_s += RETAIN_S - 2.0
    settle(at)
    assert list(at.at(A).source.retained) == [5, 6]
    at.now_s += 0.01
    settle(at)
    assert list(at.at(A).source.retained) == [6]
    at.expect(make("a+1", 3, 9, 2), B, KVSource(A, 5))
    settle(at)
    assert list(at.lanes[B].scheduler.requests) == ["a+1"]
    assert at.at(B).incoming.counts() == MigrationCounts(0, 0, 1)
    at.now_s += 2.0
    settle(at)
    assert at.at(A).source.retained == {}
    assert at.at(A).retry_in_s(at.now_s) is None


def test_retained_kv_does_not_preempt_running_requests() -> None:
    """Where a running request would be preempted it goes at once; other lanes keep theirs."""
    at = node({A: 8})
    begin(at, A, "a", prompt=8, steps=1)
    begin(at, BOTH, "b")
    begin(at, A, "c", prompt=16, steps=3, family=4)
    at.at(A).retain("a", 5)
    at.at(A).retain("b", 6)
    while not at.lanes[A].pool.missing_for_running():
        settle(at)
        assert list(at.at(A).source.retained) == [5, 6]
        at.step(A)
    settle(at)
    assert list(at.at(A).source.retained) == [6]
    at.step(A)
    assert at.lanes[A].scheduler.running[0].num_preemptions == 0


@pytest.mark.parametrize("how", ["abort", "preempted"])
def test_the_offer_of_a_request_that_does_not_end_is_revoked(how: str) -> None:
    """Before its blocks are free; it is not made again."""
    at = node()
    at.at(A).source.offer("a", RunningOffer(5, 1, early=True))
    begin(at, A)
    offered = at.read(KVSource(A, 5))
    assert offered is not None
    assert offered.tokens == 12
    assert not offered.is_final
    if how == "abort":
        at.abort("a", A)
    else:
        assert at.lanes[A].scheduler.reset_prefix_cache(reset_running_requests=True)
    for _ in range(3):
        assert at.read(KVSource(A, 5)) == CLOSED
        at.step(A)
    assert at.at(A).source.running == {}
    run_out(at)
    assert all_free(at)


def test_cached_tokens_are_not_offered_before_they_are_computed() -> None:
    """A second request shares blocks of the first, whose step is under way; another lane steps
    meanwhile.
    """
    at = node()
    at.at(A).source.offer("b", RunningOffer(5, 1, early=True))
    for name in "ab":
        at.lanes[A].scheduler.add_request(make(name, 3, 5, 3))
    at.lanes[A].schedule()
    assert at.lanes[A].scheduler.requests["b"].num_computed_tokens > 0
    at.at(A).source.publish()
    assert at.read(KVSource(A, 5)) == Offer(0, is_final=False, blocks=[])
    at.lanes[A].settle()
    at.at(A).source.publish()
    found = at.read(KVSource(A, 5))
    assert found is not None
    assert at.lanes[A].has(3, list(found.blocks), range(found.tokens))


def test_only_whole_blocks_count_when_the_rest_of_one_was_copied_in_vain() -> None:
    """Whole tiles are copied: tokens that had counted are written again, with whatever is there by
    then.
    """
    at = node({A: 5})
    before = begin(at, A)
    at.at(A).retain("a", 5)
    at.at(BOTH).target.chunks.token_s = {2: 1.0}
    at.expect(again(before, "a+1"), BOTH, KVSource(A, 5))
    arrival = at.at(BOTH).incoming.by_id["a+1"]
    for limit_s in (0.0, 5.0):
        settle(at, limit_s=limit_s)
    assert arrival.pulled_tokens == 9
    at.at(BOTH).advance(at.now_s, 9.0)
    at.at(A).source.release(5)
    begin(at, A, "b", prompt=14, family=4)
    settle(at)
    settle(at)
    assert arrival.pulled_tokens == 8
    assert at.at(BOTH).incoming.counts() == MigrationCounts(1, 8, 0)
    at.abort("b", A)
    run_out(at)
    assert all_free(at)


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_pulled_blocks_are_freed_at_their_owner(old: Group, new: Group) -> None:
    """A chunk of one block at a time; the request has all of its KV at the end, and holds blocks
    for no more before.
    """
    at = MigratingNode(dict.fromkeys(GROUPS, 20), overlaps=False, chunk_blocks=1)
    before = begin(at, old, prompt=18, steps=6)
    at.at(old).retain("a", 5)
    at.expect(again(before, "a+1", outputs=9), new, KVSource(old, 5))
    arrival = at.at(new).incoming.by_id["a+1"]
    held = []
    while at.at(new).incoming:
        settle(at)
        held.append((arrival.pulled_tokens, 19 - at.lanes[old].free(), 19 - at.lanes[new].free()))
    assert held == [(4, 5, 1), (8, 4, 2), (12, 3, 3), (16, 2, 4), (20, 1, 5), (21, 0, 6)]
    assert at.at(new).incoming.counts() == MigrationCounts(1, before.num_tokens - 1, 0)
    run_out(at)
    assert all_free(at)


def test_a_request_is_prefilled_if_a_part_of_its_kv_has_no_room() -> None:
    """It lets go of what it has: else it could wait for ever for blocks that others hold in the
    same way.
    """
    at = MigratingNode(dict.fromkeys(GROUPS, 20), overlaps=False, chunk_blocks=2)
    before = begin(at, A, prompt=18, steps=6)
    taken = at.lanes[B].pool.take(16)
    at.at(A).retain("a", 5)
    at.expect(again(before, "a+1", outputs=9), B, KVSource(A, 5))
    for _ in range(4):
        settle(at)
    assert at.lanes[A].free() == 16
    assert at.lanes[B].free() == 0
    assert at.asked[-1] == (1, 3)
    at.now_s += BLOCKS_WAIT_S + 0.1
    settle(at)
    assert not all_free(at)
    assert at.lanes[B].free() == 3
    assert at.at(B).incoming.counts() == MigrationCounts(0, 0, 1)
    at.lanes[B].pool.give(taken)
    run_out(at)
    assert all_free(at)


def test_kv_is_kept_as_long_as_other_kv_is_pulled() -> None:
    """Nobody pulls what there is no room for yet."""
    at = MigratingNode(dict.fromkeys(GROUPS, 20), overlaps=False, chunk_blocks=1)
    first, second = begin(at, A, "a"), begin(at, A, "b", family=4)
    for number, one in ((5, first), (6, second)):
        at.at(A).retain(one.request_id, number)
    at.expect(again(first, "a+1"), B, KVSource(A, 5))
    for _ in range(4):
        settle(at)
        at.now_s += RETAIN_S - 1
    assert list(at.at(A).source.retained) == [6]
    at.now_s += 1.1
    settle(at)
    assert not at.at(A).source.retained
    run_out(at)
    assert all_free(at)


def test_kv_whose_blocks_were_replaced_is_copied_again() -> None:
    """It cannot revoke what its leader offers, and the blocks that it has left may be anybody's by
    then.
    """
    at = node()
    before = begin(at, A)
    at.at(A).retain("a", 5)
    places = iter([[1, 2, 3, 4], [9, 2, 3, 4], [9, 2, 3, 4]])
    copied = []
    at.physical = lambda *look: next(places)  # type: ignore[method-assign]
    at._copy = lambda engine, source, *rest: copied.append(source[1][0][0])  # type: ignore[method-assign]
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    settle(at)
    assert copied == [1, 9]
