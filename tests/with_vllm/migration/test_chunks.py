"""Chunks: how much of an arriving request is pulled next, in blocks of four tokens."""

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from flying_serving.layout.groups import Group, KVSource
from flying_serving.migration.arrival import Arrival, ArrivalPhase
from flying_serving.migration.chunks import Chunks
from flying_serving.migration.offers import Offer
from tests.with_vllm.vllm_adapter.kv_lanes import BLOCK, KVLane, make

FIRST, SECOND = (2,), (3,)
OFFER = Offer(40, is_final=True, blocks=list(range(10)))


@pytest.fixture(scope="module", autouse=True)
def _hashes() -> None:
    """Let requests be made before lanes."""
    init_none_hash(sha256)


def arrival(name: str, source: Group, size: int = 1) -> Arrival:
    """Return a request of 41 tokens of which 40 are offered, and nothing is here."""
    family = ord(name)
    arriving = Arrival(make(name, family, 41, 5), size, KVSource(source, family), 0.0)
    arriving.enter(ArrivalPhase.OFFERED)
    return arriving


def chunks(*arrivals: Arrival, blocks: int) -> Chunks:
    """Return the chunks of these requests; in lane 1 twenty blocks are free, in lane 2 twelve."""
    pools = {1: KVLane(overlaps=False, blocks=21).pool, 2: KVLane(overlaps=False, blocks=13).pool}
    return Chunks({one.request_id: one for one in arrivals}, pools, blocks)


def begin(of: Chunks, arriving: Arrival, tokens: int) -> None:
    """Have members copy the first tokens of a request."""
    assert of.reserve(arriving, tokens, 0.0)
    arriving.enter(ArrivalPhase.PULLING)
    arriving.pulling_tokens, arriving.writers = tokens, {0}


@pytest.mark.parametrize(("under_way", "stop"), [(0, 20), (4, 16), (12, 8), (16, 4), (20, 0)])
def test_chunks_of_one_way_have_so_many_blocks_together(under_way: int, stop: int) -> None:
    """Five: what is under way is not free for the next."""
    before, next_one = arrival("a", FIRST), arrival("b", FIRST)
    of = chunks(before, next_one, blocks=5)
    if under_way:
        begin(of, before, under_way)
    assert of.next_stop(next_one, OFFER, 0.0) == stop


@pytest.mark.parametrize(("source", "size"), [(SECOND, 1), (FIRST, 2)])
def test_chunks_of_another_way_are_not_counted(source: Group, size: int) -> None:
    before, next_one = arrival("a", source, size), arrival("b", FIRST)
    of = chunks(before, next_one, blocks=5)
    begin(of, before, 16)
    assert of.next_stop(next_one, OFFER, 0.0) == 20


def test_copies_that_have_ended_are_not_under_way() -> None:
    before, next_one = arrival("a", FIRST), arrival("b", FIRST)
    of = chunks(before, next_one, blocks=5)
    begin(of, before, 16)
    before.writers.clear()
    assert of.next_stop(next_one, OFFER, 0.0) == 20


@pytest.mark.parametrize(
    ("sources", "stop"), [((FIRST,), 28), ((FIRST, FIRST), 28), ((FIRST, SECOND), 12)]
)
def test_each_source_group_gets_its_share_of_the_free_blocks(
    sources: tuple[Group, ...], stop: int
) -> None:
    """Seven of them."""
    arrivals = [arrival(name, source) for name, source in zip("ab", sources, strict=False)]
    of = chunks(*arrivals, blocks=10)
    of._pools[1].take(13)
    assert of.next_stop(arrivals[0], OFFER, 0.0) == stop


@pytest.mark.parametrize(("pulled", "whole"), [(4, 4), (5, 4), (7, 4), (8, 8), (14, 12)])
def test_a_copy_that_failed_has_spoilt_the_block_in_which_it_began(pulled: int, whole: int) -> None:
    """Of the blocks before it, one came from the prefix cache."""
    arriving = arrival("a", FIRST)
    arriving.cached_tokens, arriving.pulled_tokens, arriving.pulling_tokens = BLOCK, pulled, 20
    chunks(arriving, blocks=5).roll_back(arriving)
    assert arriving.pulled_tokens == whole


@pytest.mark.parametrize(
    ("limit_s", "token_s", "expected"),
    [
        (None, 0.5, (30, 10.0)),
        (4.0, 0.5, (18, 4.0)),
        (1.0, 0.5, (14, 2.0)),
        (99.0, 0.5, (30, 10.0)),
        (4.0, 0.0, (30, 0.0)),
    ],
)
def test_a_pull_ends_in_time_but_takes_a_block(
    limit_s: float | None, token_s: float, expected: tuple[int, float]
) -> None:
    """From token 10, at most to token 30. Without a measurement there is no limit."""
    arriving = arrival("a", FIRST)
    arriving.pulled_tokens = 10
    of = chunks(arriving, blocks=5)
    of.token_s = {1: token_s} if token_s else {}
    assert of.in_time(arriving, 30, limit_s) == expected
