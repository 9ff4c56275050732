"""An engine's KV as its peers see it, in memory that they map: offers, and lent blocks.

An offer says how many of a request's first tokens have valid KV, and in which blocks of the owner's
group. KV is append-only, so it stays valid until a block is used again. Before that the owner
revokes the offer, which has no tokens from then on.

A reader copies and then reads the offer again: the copy counts if at least its tokens are still
offered. A number is never offered twice, so no reader takes another offer for the revoked one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from flying_serving.layout.groups import Group, KVSource
from flying_serving.memory.arena import Address, Arena, announce, announced, map_peer
from flying_serving.memory.lent_blocks import NULL_BLOCK

ENTRIES = 4096
"""Numbers this far apart share an entry; the later one takes it, which revokes the earlier one."""
_NUMBER, _TOKENS, _FINAL, _BLOCKS, _HITS = _FIELDS = range(5)


@dataclass(frozen=True)
class Offer:
    """The first `tokens` tokens have KV, in `blocks` of the owner's group.

    `is_final`: True if there will be no more. `hit_tokens`: the number of
    the request's first tokens that a prefix cache had, so that they were not computed for it.
    """

    tokens: int
    is_final: bool
    blocks: Sequence[int]
    hit_tokens: int = 0


class Offers(Protocol):
    """A target's view of its peers."""

    def read(self, source: KVSource) -> Offer | None:
        """Return the offer as it is now, without tokens if it was revoked; None if it is not open
        yet.
        """

    def physical(self, engine: int, size: int, blocks: Sequence[int]) -> list[int]:
        """Return an engine's own blocks behind blocks of its group of this size."""

    def is_present(self, group: Group) -> bool:
        """Return whether no engine of a group is lost, as far as this engine knows."""


class TableShape(msgspec.Struct, frozen=True):
    """Sizes of an engine's table: blocks of the longest request, and of the engine.

    `shared_blocks`: the blocks of the engine that peers can read.
    """

    memory: Address
    offer_blocks: int
    engine_blocks: int
    shared_blocks: int


class OfferTable:
    """An engine's offers, and the own blocks behind the blocks of its groups, over mapped memory.

    One process writes. Numbers of 8 bytes are written and read as a whole, in the order of the
    program (x86-64). On other processors a reader's copy takes longer than a store needs to be
    seen.
    """

    def __init__(self, memory: memoryview, offer_blocks: int, engine_blocks: int) -> None:
        fields = len(_FIELDS)
        heads, blocks = 8 * ENTRIES * fields, 4 * ENTRIES * offer_blocks
        self._heads = np.frombuffer(memory, np.uint64, ENTRIES * fields).reshape(ENTRIES, fields)
        self._blocks = np.frombuffer(memory, np.uint32, ENTRIES * offer_blocks, heads).reshape(
            ENTRIES, offer_blocks
        )
        self._lent = np.frombuffer(memory, np.uint32, 3 * engine_blocks, heads + blocks).reshape(
            3, engine_blocks
        )

    @staticmethod
    def size_bytes(offer_blocks: int, engine_blocks: int) -> int:
        """Return the bytes of memory that a table needs. Only used pages of it exist."""
        return 8 * ENTRIES * len(_FIELDS) + 4 * ENTRIES * offer_blocks + 4 * 3 * engine_blocks

    def publish(
        self,
        number: int,
        tokens: int,
        blocks: Sequence[int],
        *,
        final: bool,
        hit_tokens: int = 0,
    ) -> None:
        """Open an offer, or add to it. It stays revoked if a later offer has its entry."""
        head, count = self._heads[number % ENTRIES], len(blocks)
        if head[_NUMBER] > number:
            return
        if head[_NUMBER] < number:
            head[_TOKENS] = head[_BLOCKS] = head[_FINAL] = 0
            head[_NUMBER] = number
        written = int(head[_BLOCKS])
        self._blocks[number % ENTRIES, written:count] = blocks[written:]
        head[_HITS] = hit_tokens
        head[_BLOCKS], head[_TOKENS], head[_FINAL] = count, tokens, final

    def revoke(self, number: int) -> None:
        """Offer nothing under a number any more, before a block of the offer is used again."""
        head = self._heads[number % ENTRIES]
        if head[_NUMBER] == number:
            head[_TOKENS] = 0
        self.publish(number, 0, [], final=True)

    def read(self, number: int) -> Offer | None:
        """Return the offer as it is now, without tokens if it was revoked; None if it is not open
        yet.
        """
        head = self._heads[number % ENTRIES]
        if head[_NUMBER] < number:
            return None
        final, tokens, count = bool(head[_FINAL]), int(head[_TOKENS]), int(head[_BLOCKS])
        hit_tokens = int(head[_HITS])
        blocks = self._blocks[number % ENTRIES, :count].tolist()
        stands = head[_NUMBER] == number and head[_TOKENS] >= tokens
        if not stands:
            return Offer(0, is_final=True, blocks=[])
        return Offer(tokens, final, blocks, hit_tokens)

    def lend(self, size: int, group_block: int, block: int) -> None:
        """Make a block of this engine a block of its group of `size` engines from now on."""
        self._lent[size.bit_length() - 2, group_block] = block

    def physical(self, size: int, blocks: Sequence[int]) -> list[int]:
        """Return this engine's own blocks behind blocks of its group of `size` engines."""
        if size == 1:
            return list(blocks)
        own_of = self._lent[size.bit_length() - 2]
        own_blocks: list[int] = own_of[np.asarray(blocks, dtype=np.intp)].tolist()
        return own_blocks


def _path(run_dir: str, engine: int) -> str:
    return f"{run_dir}/offers-{engine}"


def make_table(
    run_dir: str,
    engine: int,
    offer_blocks: int,
    engine_blocks: int,
    shared_blocks: int | None = None,
) -> OfferTable:
    """Make an engine's own table, which its peers find in the run directory.

    `shared_blocks`: the first blocks, which peers can read; None: they can read all blocks.
    """
    shared_blocks = engine_blocks if shared_blocks is None else shared_blocks
    arena = Arena(f"flying-offers-{engine}", OfferTable.size_bytes(offer_blocks, engine_blocks))
    shape = TableShape(arena.address, offer_blocks, engine_blocks, shared_blocks)
    announce(_path(run_dir, engine), shape)
    return OfferTable(memoryview(arena.bytes), offer_blocks, engine_blocks)


class PeerOffers:
    """The tables of all engines of a server. Each is mapped when it is first read.

    `is_void`: tells whether the offers of an engine's groups are void: the API server has
    lost it. The API server says so before other members of these groups hear of it. They then use
    blocks again that the groups have offered.
    """

    def __init__(self, run_dir: str, is_void: Callable[[int], bool]) -> None:
        self._run_dir = run_dir
        self._is_void = is_void
        self._tables: dict[int, OfferTable] = {}
        self._shared_blocks: dict[int, int] = {}
        """Of the engines that do not share all of their blocks."""

    def map(self, engines: Iterable[int]) -> None:
        """Map the tables of engines, as announced now. Raises PeerMemory if that fails."""
        for engine in engines:
            self._tables.pop(engine, None)
            self._table(engine)

    def unmap(self, engines: Iterable[int]) -> None:
        """Unmap the tables of engines that are lost."""
        for engine in engines:
            self._tables.pop(engine, None)

    def is_present(self, group: Group) -> bool:
        """See `Offers`."""
        return not any(map(self._is_void, group))

    def read(self, source: KVSource) -> Offer | None:
        """See `Offers`. Raises PeerMemory if the table cannot be mapped.

        An offer with a block that this engine cannot read counts as revoked.
        """
        if not self.is_present(source.group):
            return Offer(0, is_final=True, blocks=[])
        offer = self._table(source.group[0]).read(source.number)
        if offer is None or all(self._can_read(engine, source, offer) for engine in source.group):
            return offer
        return Offer(0, is_final=True, blocks=[])

    def _can_read(self, engine: int, source: KVSource, offer: Offer) -> bool:
        """Return whether an engine shares all of its blocks of an offer."""
        table, shared_blocks = self._table(engine), self._shared_blocks.get(engine)
        if shared_blocks is None or not offer.blocks:
            return True
        return max(table.physical(len(source.group), offer.blocks)) < shared_blocks

    def physical(self, engine: int, size: int, blocks: Sequence[int]) -> list[int]:
        """See `Offers`. Raises PeerMemory if the table cannot be mapped.

        For a block that the engine does not share it is the null block, which has memory. That is
        of an offer that has been revoked since, or that `read` revokes.
        """
        physical, shared_blocks = (
            self._table(engine).physical(size, blocks),
            self._shared_blocks.get(engine),
        )
        if shared_blocks is None:
            return physical
        return [block if block < shared_blocks else NULL_BLOCK for block in physical]

    def _table(self, engine: int) -> OfferTable:
        if engine not in self._tables:
            whose = f"offers of engine {engine}"
            shape = announced(_path(self._run_dir, engine), TableShape, whose)
            memory = memoryview(map_peer(shape.memory, whose))
            self._tables[engine] = OfferTable(memory, shape.offer_blocks, shape.engine_blocks)
            if shape.shared_blocks < shape.engine_blocks:
                self._shared_blocks[engine] = shape.shared_blocks
        return self._tables[engine]
