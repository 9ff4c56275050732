"""IncomingRequests: how a request ends whose blocks members still write, between real
schedulers.
"""

import pytest

from flying_serving.layout.groups import KVSource
from flying_serving.migration.arrival import Arrival, ArrivalPhase
from tests.with_vllm.migration.migrating_node import GROUPS, MigratingNode
from tests.with_vllm.migration.two_engines import again, begin, node, run_out, settle

_, B, BOTH = GROUPS
FORWARDED = 6


def written(at: MigratingNode) -> Arrival:
    """A request that goes from one engine to both, whose members have not copied its KV yet."""
    before = begin(at, B)
    at.at(B).retain("a", 5)
    at.expect(again(before, "a+1"), BOTH, KVSource(B, 5))
    at.at(BOTH).advance(at.now_s, None)
    arrival = at.at(BOTH).incoming.by_id["a+1"]
    assert arrival.phase is ArrivalPhase.PULLING
    return arrival


def used_blocks(at: MigratingNode) -> int:
    """Blocks of both engines' lane that are not free."""
    lane = at.lanes[BOTH]
    return lane.pool.total - lane.free()


def test_an_aborted_request_keeps_its_blocks_while_members_write() -> None:
    at = node()
    arrival = written(at)
    at.abort("a+1", BOTH)
    assert arrival.phase is ArrivalPhase.ABORTED
    assert used_blocks(at) == len(arrival.blocks)


def test_a_request_that_is_aborted_twice_is_freed_once() -> None:
    at = node()
    written(at)
    at.abort("a+1", BOTH)
    at.abort("a+1", BOTH)
    settle(at)
    assert used_blocks(at) == 0
    at.lanes[BOTH].pool.check(set())


def test_a_forwarded_request_that_is_aborted_is_not_offered() -> None:
    at = node()
    arrival = written(at)
    at.at(BOTH).retain("a+1", FORWARDED)
    at.abort("a+1", BOTH)
    settle(at)
    assert arrival.phase is ArrivalPhase.ABORTED
    assert at.read(KVSource(BOTH, FORWARDED)) is None
    assert used_blocks(at) == 0


def test_a_forwarded_request_of_a_dissolved_group_is_not_offered() -> None:
    at = node()
    arrival = written(at)
    at.at(BOTH).retain("a+1", FORWARDED)
    at.at(BOTH).dissolve(len(BOTH))
    assert arrival.phase is ArrivalPhase.ABORTED
    assert at.read(KVSource(BOTH, FORWARDED)) is None
    assert used_blocks(at) == 0


def test_an_aborted_request_of_a_dissolved_group_is_freed() -> None:
    """No member answers any more."""
    at = node()
    written(at)
    at.abort("a+1", BOTH)
    at.at(BOTH).dissolve(len(BOTH))
    assert not at.at(BOTH).incoming
    assert used_blocks(at) == 0


@pytest.mark.parametrize("prefix", [9, 5, 1])
def test_kv_behind_a_prefix_that_was_forgotten_is_not_used(prefix: int) -> None:
    """Members of the group may have computed the prefix differently. What all of them have pulled
    is right.
    """
    at = node()
    begin(at, BOTH, "other", prompt=prefix, steps=2)
    before = begin(at, B)
    at.at(B).retain("a", 5)
    at.expect(again(before, "a+1"), BOTH, KVSource(B, 5))
    at.at(BOTH).advance(at.now_s, None)
    arrival = at.at(BOTH).incoming.by_id["a+1"]
    assert arrival.phase is ArrivalPhase.PULLING
    assert arrival.cached_tokens == prefix - 1
    at.lanes[BOTH].pool.forget_prefixes()
    for _ in range(2):
        settle(at)
    migrated = at.at(BOTH).incoming.counts().migrated
    assert migrated == (0 if arrival.cached_tokens else 1)
    run_out(at)
