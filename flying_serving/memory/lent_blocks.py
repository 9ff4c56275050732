"""Owners of physical blocks, and how a group's blocks map to them. Pure bookkeeping, no torch, no
vLLM.

| a physical block is      | known to                    | freed by                                |
|--------------------------|-----------------------------|-----------------------------------------|
| free or cached locally   | the engine's own block pool | -                                       |
| owned by a local request | the engine's own scheduler  | that scheduler                          |
| reserved for group g     | `LentBlocks.reserved`       | commit of fewer, or it becomes lent     |
| lent to g as block v     | `LentBlocks.table[v]`       | `take_back`, when the leader returned v |
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from flying_serving.errors import IntegrityError

NULL_BLOCK = 0
"""Block 0 of every pool is vLLM's null block; it stands for itself in every lane."""


class Pool(Protocol):
    """The part of a block pool that lending needs; production is vLLM's BlockPool
    (`vllm_adapter/kv/blocks.py`).
    """

    def free_count(self) -> int:
        """Return how many blocks `take` can give."""

    def take(self, count: int) -> list[int]:
        """Take blocks out, least recently used first; their cached contents are forgotten."""

    def give(self, blocks: list[int]) -> None:
        """Put blocks back into the pool."""


class LentBlocks:
    """A member's side: the physical blocks that it has lent to one group, and the group blocks that
    they are.

    `show` is called with each block that is lent: the group's and the physical one.
    """

    def __init__(self, pool: Pool, show: Callable[[int, int], None]) -> None:
        self._pool = pool
        self._show = show
        self.reserved: list[int] = []
        self.table: dict[int, int] = {NULL_BLOCK: NULL_BLOCK}

    @property
    def lent_count(self) -> int:
        """Number of blocks that the group has."""
        return len(self.table) - 1

    def reserve(self, count: int) -> int:
        """Set aside up to `count` free blocks. Returns how many."""
        if self.reserved:
            raise IntegrityError(
                f"{count} blocks to reserve while {len(self.reserved)} are still reserved"
            )
        self.reserved = self._pool.take(min(count, self._pool.free_count()))
        return len(self.reserved)

    def commit(self, group_blocks: list[int]) -> None:
        """Lend reserved blocks as `group_blocks`; the other reserved blocks go back to the pool."""
        if len(group_blocks) > len(self.reserved):
            raise IntegrityError(
                f"commit of {len(group_blocks)} blocks, {len(self.reserved)} reserved"
            )
        for v, physical in zip(group_blocks, self.reserved, strict=False):
            if v in self.table:
                raise IntegrityError(f"group block {v} is lent already")
            self.table[v] = physical
            self._show(v, physical)
        rest = self.reserved[len(group_blocks) :]
        self.reserved = []
        self._pool.give(rest)

    def take_back(self, group_blocks: list[int]) -> None:
        """Take back blocks that the leader returned, as this engine's own."""
        missing = [v for v in group_blocks if v == NULL_BLOCK or v not in self.table]
        if missing:
            raise IntegrityError(f"group blocks {missing} returned but not lent")
        self._pool.give([self.table.pop(v) for v in group_blocks])

    def take_all_back(self) -> None:
        """Take back all blocks as this engine's own: the group is no more."""
        self._pool.give(
            [*self.reserved, *(block for block in self.table.values() if block != NULL_BLOCK)]
        )
        self.reserved, self.table = [], {NULL_BLOCK: NULL_BLOCK}

    def translate(self, group_blocks: Iterable[int]) -> list[int]:
        """Return the physical blocks of group blocks."""
        table = self.table
        return [table[v] for v in group_blocks]

    def replace(self, copies: Mapping[int, int]) -> None:
        """Lend copies in place of some physical blocks. `copies`: the new blocks by the old."""
        for group_block, physical in self.table.items():
            if physical in copies:
                self.table[group_block] = copies[physical]
                self._show(group_block, copies[physical])

    def physical(self) -> set[int]:
        """Return every physical block that is out: lent or reserved."""
        out = set(self.table.values()) - {NULL_BLOCK}
        if len(out) != self.lent_count or out & set(self.reserved):
            raise IntegrityError(
                f"{self.lent_count} lent and {len(self.reserved)} reserved blocks overlap"
            )
        return out | set(self.reserved)


class BorrowedBlocks:
    """A leader's side: the group blocks that its scheduler may use. All others are withheld from
    the group's full pool.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._withheld = pool.take(pool.free_count())
        self._withheld.sort(reverse=True)
        self.capacity = len(self._withheld)
        self.held: set[int] = set()

    def free_count(self) -> int:
        """Return how many group blocks are lent and not in use."""
        return self._pool.free_count()

    @property
    def in_use(self) -> int:
        """Number of group blocks that requests hold."""
        return len(self.held) - self._pool.free_count()

    def room(self) -> int:
        """Return how many more blocks could be lent."""
        return len(self._withheld)

    def choose(self, count: int) -> list[int]:
        """Return names (group block numbers) for blocks that the members are about to lend."""
        return [self._withheld.pop() for _ in range(min(count, len(self._withheld)))]

    def add(self, group_blocks: list[int]) -> None:
        """Let the group's scheduler use blocks that every member lends now."""
        self.held.update(group_blocks)
        self._pool.give(group_blocks)

    def give_up(self, count: int) -> list[int]:
        """Take up to `count` unused blocks from the scheduler, least recently used first, to return
        them.
        """
        freed = self._pool.take(max(0, min(count, self._pool.free_count())))
        self.held.difference_update(freed)
        self._withheld.extend(freed)
        return freed

    def check(self) -> None:
        """Raise IntegrityError unless each group block is exactly one of held and withheld."""
        if len(self.held) + len(self._withheld) != self.capacity or self.held & set(self._withheld):
            raise IntegrityError(
                f"held {len(self.held)} + withheld {len(self._withheld)} != {self.capacity}"
            )
        if self._pool.free_count() > len(self.held):
            raise IntegrityError(
                f"{self._pool.free_count()} free group blocks, {len(self.held)} held"
            )
