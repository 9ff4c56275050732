"""SchedulerPool over vLLM's own KVCacheManager: blocks of requests that leave with their KV, and of
those that come.
"""

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from flying_serving.vllm_adapter.kv.blocks import SchedulerPool
from tests.with_vllm.vllm_adapter.kv_configs import of_one_layer


class BlockManager:
    """What `SchedulerPool` asks of a vLLM scheduler, around vLLM's own KVCacheManager: blocks of
    four tokens.
    """

    block_size = 4
    num_spec_tokens = 0
    max_model_len = 1000

    def __init__(self, blocks: int = 12) -> None:
        init_none_hash(sha256)
        self.kv_cache_manager = KVCacheManager(
            of_one_layer(blocks, 4), 1000, scheduler_block_size=4, hash_block_size=4
        )
        self.requests: dict[str, Request] = {}
        self.cached_tokens: dict[str, int] = {}
        self.hit_tokens: dict[str, int] = {}
        self.arrived_tokens: dict[str, int] = {}
        self.pool = SchedulerPool(self)

    @property
    def free(self) -> int:
        """How many blocks nobody uses."""
        return self.pool.free_count()

    def begin(self, name: str, tokens: int) -> Request:
        """A request comes and all of its tokens but the last are computed, as far as they are not
        cached.
        """
        request = tokens_of(name, tokens)
        self.requests[name] = request
        cached, start, _ = self.kv_cache_manager.get_computed_blocks(request)
        assert (
            self.kv_cache_manager.allocate_slots(request, tokens - 1 - start, start, cached)
            is not None
        )
        request.num_computed_tokens = tokens - 1
        return request

    def end(self, name: str) -> None:
        """A request is over."""
        self.kv_cache_manager.free(self.requests.pop(name))

    def go_on(self, request: Request) -> None:
        """The scheduler has it from here on: it computes what is left, and one token more."""
        self.requests[request.request_id] = request
        for _ in range(2):
            left = request.num_tokens - request.num_computed_tokens
            assert self.kv_cache_manager.allocate_slots(request, left) is not None
            request.num_computed_tokens = request.num_tokens
            request.append_output_token_ids(7)
        assert len(self.blocks(request)) == -(-request.num_computed_tokens // 4)

    def blocks(self, request: Request) -> list[int]:
        """What a request holds."""
        return list(self.kv_cache_manager.get_block_ids(request.request_id)[0])

    def cached(self, tokens: int) -> int:
        """How many tokens the prefix cache has of a request that would come now."""
        return int(self.kv_cache_manager.get_computed_blocks(tokens_of("probe", tokens))[1])


def tokens_of(name: str, tokens: int) -> Request:
    """A request of so many tokens, of which some are outputs: they are the same in all requests."""
    params = SamplingParams(max_tokens=50)
    hasher = get_request_block_hasher(4, sha256)
    made = Request(name, list(range(-(-tokens // 2))), params, None, block_hasher=hasher)
    made.append_output_token_ids(list(range(-(-tokens // 2), tokens)))
    return made


def test_pinned_blocks_outlive_their_request() -> None:
    """Even if another request shares some of them; they are free when both let go, and still
    cached.
    """
    lane = BlockManager()
    first, second = lane.begin("first", 14), lane.begin("second", 10)
    assert lane.blocks(first)[:2] == lane.blocks(second)[:2]
    blocks = lane.pool.pin("first")
    assert blocks == lane.blocks(first)
    lane.pool.check(set())
    lane.end("first")
    assert lane.pool.requests_own() == {*blocks, *lane.blocks(second)}
    lane.pool.check(set())
    lane.pool.unpin(blocks)
    assert lane.pool.requests_own() == set(lane.blocks(second))
    lane.pool.check(set())
    assert lane.free == 11 - 3
    assert lane.cached(14) == 12
    lane.end("second")
    assert lane.free == 11
    assert lane.cached(14) == 12


def test_a_block_that_is_pinned_twice_is_released_twice() -> None:
    """Two requests of one prefix leave at once."""
    lane = BlockManager()
    for name in ("first", "second"):
        lane.begin(name, 9)
    pinned = [lane.pool.pin(name) for name in ("first", "second")]
    assert pinned[0] == pinned[1]
    for name, blocks in zip(("first", "second"), pinned, strict=True):
        lane.end(name)
        lane.pool.check(set())
        assert lane.free == 11 - 2
        lane.pool.unpin(blocks)
        lane.pool.check(set())
    assert lane.free == 11
    with pytest.raises(ValueError, match="not in list"):
        lane.pool.unpin(pinned[0])


def test_the_end_of_what_was_pinned_is_evicted_first() -> None:
    """As of any request that ends."""
    lane = BlockManager(6)
    lane.begin("a", 17)
    blocks = lane.pool.pin("a")
    lane.end("a")
    lane.pool.unpin(blocks)
    lane.pool.take(3)
    assert lane.cached(17) == 8


def test_blocks_for_kv_that_is_to_arrive() -> None:
    """What the prefix cache has counts as there; the rest is cached once it has come, and the
    scheduler goes on.
    """
    lane = BlockManager()
    lane.begin("before", 10)
    lane.end("before")
    arriving = tokens_of("arriving", 16)
    room = lane.pool.prepare(arriving, 15)
    assert room is not None
    start, blocks = room
    assert start == 8
    assert len(blocks) == 4
    assert blocks == lane.blocks(arriving)
    assert lane.pool.requests_own() == set(blocks)
    assert lane.free == 7
    lane.pool.check(set())
    assert lane.cached(16) == 8
    lane.pool.arrived(arriving, 15)
    assert lane.cached(16) == 12
    assert arriving.num_computed_tokens == 15
    assert lane.blocks(arriving) == blocks
    lane.go_on(arriving)
    lane.pool.check(set())
    assert lane.cached(30) == 16
    lane.end("arriving")
    assert lane.free == 11
    assert lane.pool.requests_own() == set()


def test_less_may_arrive_than_was_prepared_for() -> None:
    """The scheduler computes the rest into the blocks that are there."""
    lane = BlockManager()
    arriving = tokens_of("arriving", 16)
    assert lane.pool.prepare(arriving, 15) is not None
    lane.pool.arrived(arriving, 6)
    assert lane.cached(16) == 4
    assert arriving.num_computed_tokens == 6
    assert lane.free == 7
    lane.go_on(arriving)
    lane.pool.check(set())


def test_no_block_is_set_aside_if_there_are_too_few() -> None:
    """Nor does a cached prefix stay held; when there are enough it goes."""
    lane = BlockManager(8)
    lane.begin("before", 10)
    lane.end("before")
    taken = lane.pool.take(3)
    arriving = tokens_of("arriving", 21)
    for _ in range(2):
        assert lane.pool.prepare(arriving, 20) is None
        assert lane.free == 4
        assert lane.blocks(arriving) == []
        assert lane.cached(21) == 8
        lane.pool.check(set(taken))
    assert lane.pool.missing_for(20) == 2
    lane.pool.give(taken[:2])
    assert lane.pool.missing_for(20) == 0
    assert lane.pool.prepare(arriving, 20) is not None
    lane.pool.check(set(taken[2:]))


@pytest.mark.parametrize("prepared", [True, False])
def test_blocks_of_kv_that_does_not_arrive_are_released(prepared: bool) -> None:
    """Its prefix stays cached, and it may begin like any other."""
    lane = BlockManager()
    lane.begin("before", 10)
    lane.end("before")
    arriving = tokens_of("arriving", 16)
    if prepared:
        assert lane.pool.prepare(arriving, 15) is not None
    lane.pool.release(arriving)
    assert lane.free == 11
    assert lane.pool.requests_own() == set()
    assert lane.cached(16) == 8
    lane.pool.check(set())
    assert lane.begin("arriving", 16).num_computed_tokens == 15


def test_all_kv_may_be_cached_or_none_may_arrive() -> None:
    """No block is taken then but cached ones and one for the next token, or none."""
    lane = BlockManager()
    held = lane.blocks(lane.begin("running", 9))
    arriving, single = tokens_of("arriving", 9), tokens_of("single", 1)
    assert lane.pool.prepare(arriving, 8) == (8, lane.blocks(arriving))
    assert lane.blocks(arriving)[:-1] == held
    assert lane.pool.prepare(single, 0) == (0, [])
    assert lane.free == 8
    lane.pool.check(set())
    lane.pool.arrived(arriving, 8)
    lane.pool.release(single)
    lane.go_on(arriving)
    lane.pool.check(set())


def test_there_is_room_for_the_next_token() -> None:
    """Requests that came and could not go on would keep each other waiting."""
    lane = BlockManager(6)
    arriving = [tokens_of(name, 9) for name in ("first", "second")]
    assert lane.pool.prepare(arriving[0], 8) is not None
    assert lane.free == lane.pool.missing_for(8) + 1 == 2
    assert lane.pool.prepare(arriving[1], 8) is None
    lane.pool.arrived(arriving[0], 8)
    assert lane.kv_cache_manager.allocate_slots(arriving[0], 1) is not None
    assert lane.free == 2


def test_blocks_are_set_aside_and_released_part_by_part() -> None:
    """Of the cached prefix once; what is pinned is freed from the first block on, and cached as it
    was.
    """
    lane = BlockManager(8)
    lane.begin("before", 10)
    lane.end("before")
    arriving = tokens_of("arriving", 21)
    assert lane.pool.prepare(arriving, 9, next_token=False) == (8, lane.blocks(arriving))
    assert len(lane.blocks(arriving)) == 3
    assert lane.free == 4
    assert lane.pool.extend(arriving, 12, next_token=False) == lane.blocks(arriving)
    assert lane.pool.extend(arriving, 20, next_token=True) == lane.blocks(arriving)
    assert len(lane.blocks(arriving)) == 6
    assert lane.free == 1
    assert lane.pool.missing_for(27, 6) == 0
    assert lane.pool.extend(arriving, 32, next_token=True) is None
    lane.pool.arrived(arriving, 20)
    blocks = lane.pool.pin("arriving")
    lane.pool.release(arriving)
    for count, left in ((2, 4), (0, 4), (1, 3), (None, 0)):
        blocks = lane.pool.unpin(blocks, count)
        assert len(blocks) == left
        assert lane.pool.requests_own() == set(blocks)
        lane.pool.check(set())
    assert lane.free == 7
    assert lane.cached(21) == 20
