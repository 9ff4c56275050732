"""The pool of lane 1, whose blocks are the engine's physical ones: some of them may be withheld
from all lanes.
"""

from collections.abc import Iterable, Mapping, Sequence

from flying_serving.vllm_adapter.blocks import SchedulerPool


class EnginePool(SchedulerPool):
    """A pool that nobody may have some blocks of for a while."""

    def free_of(self, blocks: Iterable[int]) -> list[int]:
        """Those of some blocks without a user."""
        every = self._pool.blocks
        return [block for block in blocks if every[block].ref_cnt == 0 and not every[block].is_null]

    def withhold(self, blocks: Sequence[int]) -> None:
        """Nobody may have these blocks, which have no user; what they cached is forgotten."""
        self._claim(blocks)
        self.withheld.update(blocks)

    def allow(self, blocks: Sequence[int]) -> None:
        """Blocks that were withheld are free."""
        self.withheld.difference_update(blocks)
        self.give(list(blocks))

    def swap(self, copies: Mapping[int, int]) -> None:
        """Who has some blocks has others, which had no user, new ones by old; the old ones are
        withheld.
        """
        self._claim(list(copies.values()))
        self.withheld.update(copies)

    def _claim(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[b] for b in blocks])
        self._pool.evict_blocks(set(blocks))
