"""KV that a group pulls ahead of its request, while another group computes it."""

import pytest
from vllm.v1.request import Request

from flying_serving.layout.groups import KVSource
from flying_serving.migration.source import RETAIN_S, RunningOffer
from flying_serving.migration.target import OPENING_S, STALLED_S
from flying_serving.wire import MigrationCounts
from tests.with_vllm.migration.migrating_node import MigratingNode
from tests.with_vllm.migration.two_engines import (
    BOTH,
    CLOSED,
    A,
    B,
    again,
    all_free,
    node,
    run_out,
    settle,
)
from tests.with_vllm.vllm_adapter.kv_lanes import make


def ahead(at: MigratingNode, early: bool = True) -> Request:
    """A request that ends in one group after three outputs, and is pulled ahead by the other."""
    made = make("a", 3, 10, 3)
    at.at(A).source.offer("a", RunningOffer(5, 1, early=early))
    at.lanes[A].scheduler.add_request(made)
    at.expect(make("b", 3, 10, 20), B, KVSource(A, 5), 12)
    return made


@pytest.mark.parametrize("early", [True, False])
def test_kv_is_pulled_while_it_is_computed(early: bool) -> None:
    """Then the request comes under the same name, and has all that there is at once."""
    at = node()
    made = ahead(at, early)
    pulled = []
    for _ in range(4):
        at.step(A)
        settle(at)
        pulled.append(at.at(B).incoming.by_id["b"].pulled_tokens)
    assert pulled == ([8, 10, 11, 12] if early else [0, 0, 0, 12])
    assert "a" in at.ended
    assert list(at.at(A).source.retained) == [5]
    at.expect(again(made, "b"), B, KVSource(A, 5))
    settle(at)
    assert at.at(B).incoming.counts() == MigrationCounts(1, 12, 0)
    assert at.at(A).source.retained == {}
    run_out(at)
    assert all_free(at)


def test_an_aborted_prefetch_leaves_the_offer_of_a_running_request() -> None:
    """The request goes to a third group with it; if it has ended it may do so too, until its KV is
    overdue.
    """
    at = node()
    made = ahead(at)
    at.step(A)
    settle(at)
    at.abort("b", B)
    settle(at)
    assert at.at(B).incoming.by_id == {}
    assert at.lanes[B].free() == at.lanes[B].pool.total
    while "a" not in at.ended:
        at.step(A)
    at.expect(again(made, "c"), BOTH, KVSource(A, 5))
    settle(at)
    assert at.at(BOTH).incoming.counts() == MigrationCounts(1, 12, 0)
    run_out(at)
    at = node()
    ahead(at)
    while "a" not in at.ended:
        at.step(A)
    settle(at)
    at.abort("b", B)
    settle(at)
    assert list(at.at(A).source.retained) == [5]
    at.now_s += RETAIN_S + 0.1
    settle(at)
    assert at.at(A).source.retained == {}
    assert all_free(at)


def test_a_request_waits_for_a_prefix_in_a_long_queue() -> None:
    """Its owner has it and says so, but has not come to it: only after STALLED_S is it
    prefilled.
    """
    at = node()
    at.at(A).source.offer("prefix", RunningOffer(5, 1, early=True))
    at.expect(make("a", 3, 10, 3), B, KVSource(A, 5))
    at.now_s += OPENING_S + 0.1
    settle(at)
    assert at.at(B).incoming
    assert at.lanes[B].free() == at.lanes[B].pool.total
    at.now_s += STALLED_S
    settle(at)
    assert at.at(B).incoming.counts() == MigrationCounts(0, 0, 1)
    assert "a" in at.lanes[B].scheduler.requests


def test_a_dropped_prefetch_is_pulled_when_its_request_arrives() -> None:
    """When nothing more came for long; the blocks are free meanwhile."""
    at = node()
    made = ahead(at)
    at.step(A)
    settle(at)
    at.now_s += STALLED_S
    settle(at)
    assert at.at(B).incoming
    at.now_s += 0.1
    settle(at)
    assert at.at(B).incoming.by_id == {}
    assert at.lanes[B].free() == at.lanes[B].pool.total
    while "a" not in at.ended:
        at.step(A)
    at.expect(again(made, "b"), B, KVSource(A, 5))
    settle(at)
    assert at.at(B).incoming.counts() == MigrationCounts(1, 12, 0)
    run_out(at)


def test_a_request_with_all_its_blocks_needs_no_free_block() -> None:
    """Of a request that was pulled ahead the last tokens come when it is to run, however full the
    lane is then.
    """
    at = node()
    made = ahead(at)
    for _ in range(2):
        at.step(A)
        settle(at)
    (arrival,) = at.at(B).incoming.by_id.values()
    assert 8 < arrival.pulled_tokens < 12
    at.lanes[B].pool.take(at.lanes[B].free())
    while "a" not in at.ended:
        at.step(A)
    at.expect(again(made, "b"), B, KVSource(A, 5))
    settle(at)
    assert at.at(B).incoming.counts() == MigrationCounts(1, 12, 0)
    assert at.asked == []


def test_pulled_kv_of_a_preempted_request_stays() -> None:
    """It is offered no more, and when the request comes the rest is prefilled."""
    at = node()
    made = ahead(at)
    at.step(A)
    settle(at)
    assert at.lanes[A].scheduler.reset_prefix_cache(reset_running_requests=True)
    assert at.read(KVSource(A, 5)) == CLOSED
    while "a" not in at.ended:
        at.step(A)
        settle(at)
    assert at.at(A).source.retained == {}
    at.expect(again(made, "b"), B, KVSource(A, 5))
    settle(at)
    assert at.at(B).incoming.counts() == MigrationCounts(1, 8, 0)
    run_out(at)
    assert all_free(at)
