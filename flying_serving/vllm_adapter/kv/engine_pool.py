"""The pool of lane 1, whose blocks are the engine's physical ones: some of them may be withheld
from all lanes.
"""

from collections.abc import Iterable, Mapping, Sequence

from flying_serving.vllm_adapter.kv.blocks import SchedulerPool


class EnginePool(SchedulerPool):
    """A pool that can withhold some of its blocks for a while."""

    def free_of(self, blocks: Iterable[int]) -> list[int]:
        """Return which of some blocks have no user."""
        every = self._pool.blocks
        return [block for block in blocks if every[block].ref_cnt == 0 and not every[block].is_null]

    def withhold(self, blocks: Sequence[int]) -> None:
        """Withhold these blocks, which have no user. Their cached contents are forgotten."""
        self._claim(blocks)
        self.withheld.update(blocks)

    def allow(self, blocks: Sequence[int]) -> None:
        """Free blocks that were withheld."""
        self.withheld.difference_update(blocks)
        self.give(list(blocks))

    def swap(self, copies: Mapping[int, int]) -> None:
        """Exchange used blocks for blocks without a user (`copies`: new ones by old). The old ones
        are withheld.
        """
        self._claim(list(copies.values()))
        self.withheld.update(copies)

    def _claim(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[b] for b in blocks])
        self._pool.evict_blocks(set(blocks))
