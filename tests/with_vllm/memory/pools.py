"""Block pools for tests of the bookkeeping: a plain one, and vLLM's own behind a stand-in for its
scheduler.
"""

from collections import deque
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from flying_serving.vllm_adapter.kv.blocks import SchedulerPool


class PlainPool:
    """The protocol `flying_serving.memory.lent_blocks.Pool` and nothing else; it notices what is
    given twice.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free = deque(range(1, blocks))

    def free_count(self) -> int:
        """Return how many blocks `take` can give."""
        return len(self.free)

    def take(self, count: int) -> list[int]:
        """Take blocks out, oldest first."""
        assert 0 <= count <= len(self.free)
        return [self.free.popleft() for _ in range(count)]

    def give(self, blocks: list[int]) -> None:
        """Put blocks back."""
        assert len(set(blocks)) == len(blocks)
        assert not set(blocks) & set(self.free)
        assert all(0 < block < self.blocks for block in blocks)
        self.free.extend(blocks)

    def free_blocks(self) -> set[int]:
        """Return which blocks are free."""
        return set(self.free)

    def remember(self, block: int, name: bytes) -> None:
        """A plain pool caches nothing."""

    def remembers(self, name: bytes) -> int | None:
        """A plain pool caches nothing."""
        return None


class StandInScheduler:
    """What `SchedulerPool` asks of a vLLM scheduler, around a real BlockPool; `owned` is what its
    requests hold.
    """

    num_spec_tokens = 0

    def __init__(self, blocks: int, block_size: int = 4) -> None:
        self.block_size = block_size
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=block_size)
        self.owned: dict[str, list[int]] = {}
        self.requests: dict[str, Any] = {}
        self.kv_cache_manager = SimpleNamespace(
            block_pool=self.pool,
            get_block_ids=lambda request_id: (self.owned.get(request_id, []),),
            get_blocks=lambda request_id: SimpleNamespace(blocks=(self.owned.get(request_id, []),)),
        )


class VllmPool(SchedulerPool):
    """vLLM's pool, with what a test wants to see of it."""

    def __init__(self, blocks: int) -> None:
        self.scheduler = StandInScheduler(blocks)
        super().__init__(self.scheduler)

    def free_blocks(self) -> set[int]:
        """Return which blocks are free, as the free list has it."""
        return {block.block_id for block in self._pool.free_block_queue.get_all_free_blocks()}

    def remember(self, block: int, name: bytes) -> None:
        """Cache a block under a name, as vLLM does with a full one."""
        if self._pool.blocks[block].block_hash is None:
            key = make_block_hash_with_group_id(BlockHash(name), 0)
            self._pool._insert_block_hash(key, self._pool.blocks[block], num_tokens=4)

    def remembers(self, name: bytes) -> int | None:
        """Return the block that is cached under a name."""
        found = self._pool.get_cached_block(BlockHash(name), [0])
        return found[0].block_id if found else None

    def check_owned(self, owned: list[int], outside: set[int]) -> None:
        """Run the production check for requests that own these blocks."""
        self.scheduler.requests = {"r": None} if owned else {}
        self.scheduler.owned = {"r": owned}
        self.check(outside)
