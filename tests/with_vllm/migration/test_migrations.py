"""Migrations of two engines over vLLM's own schedulers: requests that arrive with their KV."""

import pytest

from flying_serving.layout.groups import Group, KVSource
from flying_serving.migration.messages import KVPulled, PullKV, ReleaseKV
from flying_serving.migration.offers import Offer
from flying_serving.migration.target import OPENING_S
from flying_serving.wire import MigrationCounts
from tests.with_vllm.migration.two_engines import (
    BOTH,
    CLOSED,
    NOTHING,
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

# ---- there and away


@pytest.mark.parametrize(("old", "new"), PAIRS)
@pytest.mark.parametrize("told_first", [True, False])
def test_a_request_arrives_with_its_kv(old: Group, new: Group, told_first: bool) -> None:
    """Retained, then fetched; or expected before its old group was told that it leaves."""
    at = node()
    before = begin(at, old)
    assert before.num_tokens == 13
    if told_first:
        at.at(old).retain("a", 5)
        assert at.lanes[old].scheduler.requests == {}
    at.expect(again(before, "a+1"), new, KVSource(old, 5))
    assert at.at(new).incoming
    if not told_first:
        settle(at)
        assert at.lanes[new].scheduler.requests == {}
        assert at.at(new).incoming.counts() == NOTHING
        at.at(old).retain("a", 5)
    settle(at)
    assert not at.at(new).incoming
    assert at.at(new).incoming.counts() == MigrationCounts(1, 12, 0)
    assert at.at(old).source.retained == {}
    assert at.lanes[old].free() == at.lanes[old].pool.total
    assert at.lanes[new].scheduler.requests["a+1"].num_computed_tokens == 12
    run_out(at)
    assert "a+1" in at.ended
    assert all_free(at)


def test_kv_of_a_lost_engine_is_not_copied() -> None:
    """Its memory is not mapped any more. A leader that has not heard of it gets its answer."""
    at = node()
    begin(at, B)
    at.lost = {1}
    before = list(at.lanes[BOTH].kv)
    at.migrations[0].handle(PullKV(BOTH, "a+1", KVSource(B, 5), [1, 2], [3, 4], range(8)))
    assert at.lanes[BOTH].kv == before
    assert list(at.inboxes[0]) == [KVPulled(BOTH, 0, "a+1")]


@pytest.mark.parametrize("steps", [0, 1])
def test_tokens_without_kv_are_prefilled(steps: int) -> None:
    """All of it, or what was not computed yet."""
    at = node()
    before = begin(at, A, steps=steps)
    at.at(A).retain("a", 5)
    at.expect(again(before, "a+1"), BOTH, KVSource(A, 5))
    for _ in range(2):
        settle(at)
    assert at.at(BOTH).incoming.counts() == (
        MigrationCounts(1, 8, 0) if steps else MigrationCounts(0, 0, 1)
    )
    run_out(at)
    assert all_free(at)


def test_a_request_that_is_unknown_is_prefilled_at_once() -> None:
    """Its old group says that it has nothing."""
    at = node()
    at.at(A).retain("a", 5)
    at.expect(make("a+1", 3, 9, 2), B, KVSource(A, 5))
    settle(at)
    assert at.at(B).incoming.counts() == MigrationCounts(0, 0, 1)
    assert list(at.lanes[B].scheduler.requests) == ["a+1"]


def test_a_step_under_way_is_not_offered() -> None:
    """Its tokens are computed again."""
    at = node()
    before = begin(at, A)
    at.lanes[A].schedule()
    at.at(A).retain("a", 5)
    assert at.read(KVSource(A, 5)) == Offer(
        12, is_final=True, blocks=at.at(A).source.retained[5].blocks
    )
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    settle(at)
    at.lanes[A].settle()
    run_out(at)
    assert all_free(at)


def test_tokens_in_the_prefix_cache_are_not_pulled() -> None:
    """The rest is, into blocks that no other request uses."""
    at = node()
    other = begin(at, B, "other", prompt=9, steps=2)
    shared = at.lanes[B].pool.blocks_of("other")[:2]
    before = begin(at, A)
    at.at(A).retain("a", 5)
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    settle(at)
    assert at.at(B).incoming.counts() == MigrationCounts(1, 4, 0)
    assert at.lanes[B].pool.blocks_of("a+1")[:2] == shared
    assert at.lanes[B].has(3, shared, range(8))
    assert other.num_tokens == 10
    run_out(at)


@pytest.mark.parametrize("prompt", [1, 9])
def test_a_request_that_needs_no_kv_pulls_none(prompt: int) -> None:
    """One of a single token, or all in the prefix cache: it is neither moved nor prefilled
    again.
    """
    at = node()
    begin(at, B, "other", prompt=9, steps=2)
    before = begin(at, A, prompt=prompt, steps=0)
    at.at(A).retain("a", 5)
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    settle(at)
    assert "a+1" in at.lanes[B].scheduler.requests
    assert at.at(B).incoming.counts().migrated == 0
    run_out(at)
    assert all_free(at)


def test_kv_of_a_request_that_gave_up_is_not_retained() -> None:
    """Its owner was in a step for so long that the request runs elsewhere by now."""
    at = node()
    before = begin(at, A)
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    at.now_s += OPENING_S + 0.1
    settle(at)
    assert at.at(B).incoming.counts() == MigrationCounts(0, 0, 1)
    at.at(A).retain("a", 5)
    assert at.at(A).source.retained == {}
    assert at.lanes[A].free() == at.lanes[A].pool.total
    assert at.read(KVSource(A, 5)) == CLOSED


def test_a_request_without_offered_kv_does_not_wait_for_room() -> None:
    """It is prefilled when there is some, like any other."""
    at = node()
    taken = at.lanes[B].pool.take(19)
    at.at(A).retain("a", 5)
    at.expect(make("a+1", 3, 9, 2), B, KVSource(A, 5))
    settle(at)
    assert list(at.lanes[B].scheduler.requests) == ["a+1"]
    assert at.asked == []
    at.lanes[B].pool.give(taken)


# ---- chunks


@pytest.mark.parametrize("new", [B, BOTH])
def test_a_pull_takes_the_time_that_there_is(new: Group) -> None:
    """At least a block, then the next; a group's members each answer before it goes on."""
    at = node()
    before = begin(at, A)
    at.at(A).retain("a", 5)
    at.at(new).target.chunks.token_s = {len(new): 1.0}
    at.expect(again(before, "a+1"), new, KVSource(A, 5))
    arrival = at.at(new).incoming.by_id["a+1"]
    pulled, released = [], []
    for limit_s in (0.0, 5.0, 9.0):
        at.at(new).advance(at.now_s, limit_s)
        if new == BOTH:
            assert [type(message) for message in at.inboxes[1]] == [PullKV]
            at.at(new).advance(at.now_s, limit_s)
            at.serve(1)
            assert at.inboxes[0][1] == KVPulled(BOTH, 1, "a+1")
            before_tokens = arrival.pulled_tokens
            at.serve(0)
            at.serve(0)
            assert arrival.pulled_tokens == before_tokens
            at.serve(0)
        pulled.append(arrival.pulled_tokens)
        released.append(at.inboxes[0].popleft())
        at.migrations[0].handle(released[-1])
    assert pulled == [4, 9, 12]
    assert at.at(new).incoming.counts() == MigrationCounts(1, 12, 0)
    assert released == [ReleaseKV(A, 5, 4), ReleaseKV(A, 5, 9), ReleaseKV(A, 5)]
    settle(at)
    run_out(at)
    assert all_free(at)


def test_a_pull_for_which_time_ran_out_goes_on_at_once() -> None:
    at = node()
    before = begin(at, A)
    at.at(A).retain("a", 5)
    at.at(B).target.chunks.token_s = {1: 1.0}
    at.expect(again(before, "a+1"), B, KVSource(A, 5))
    at.at(B).advance(at.now_s, 5.0)
    assert at.at(B).retry_in_s(at.now_s) == 0.0
    at.at(B).advance(at.now_s, 7.0)
    assert at.at(B).retry_in_s(at.now_s) is None


@pytest.mark.parametrize(("limit_s", "tokens"), [(12.0, 0), (17.0, 5)])
def test_requests_share_the_time_that_there_is(limit_s: float, tokens: int) -> None:
    """The first takes it for its twelve tokens, and the second has the rest."""
    at = node()
    at.at(B).target.chunks.token_s = {1: 1.0}
    for number, name in enumerate("ab", 5):
        before = begin(at, A, name, family=number)
        at.at(A).retain(name, number)
        at.expect(again(before, f"{name}+1"), B, KVSource(A, number))
    at.at(B).advance(at.now_s, limit_s)
    assert list(at.lanes[B].scheduler.requests) == ["a+1"]
    assert at.at(B).incoming.by_id["b+1"].pulled_tokens == tokens


def test_blocks_used_again_while_they_are_copied_do_not_count() -> None:
    """Whole blocks that came before it do; the rest is prefilled."""
    at = node()
    before = begin(at, A)
    at.at(A).retain("a", 5)
    at.at(BOTH).target.chunks.token_s = {2: 1.0}
    at.expect(again(before, "a+1"), BOTH, KVSource(A, 5))
    settle(at, limit_s=5.0)
    at.at(BOTH).advance(at.now_s, None)
    at.serve(1)
    at.at(A).source.release(5)
    at.lanes[A].kv[:] = [-2] * len(at.lanes[A].kv)
    settle(at)
    settle(at)
    assert at.at(BOTH).incoming.counts() == MigrationCounts(1, 4, 0)
    run_out(at)
    assert all_free(at)
