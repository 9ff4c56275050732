"""KV that goes from one group's lane to another's: who holds which heads, and the exchange (torch, no vLLM).

In every lane a token's KV lies in some block of each layer, for the heads of that rank. The ranks of the old group tell
all that they have, one after the other, and each rank of the new group keeps the heads that it works with. So one
primitive, a broadcast, serves every pair of groups: a split, a merge, or neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from flying_serving.layout.shards import Segment

PIECE_BYTES = 64 << 20
"""Memory that an exchange takes beside the KV cache, at most, but for the tokens of one layer."""

Broadcast = Callable[[torch.Tensor, int], torch.Tensor]
"""(tensor, rank it comes from) -> the tensor, which was overwritten on all other ranks."""


def heads_of(rank: int, degree: int, kv_heads: int) -> range:
    """The model's KV heads that a rank of a lane has; ranks beyond their number share one."""
    return Segment(kv_heads, kv_heads).units_of(rank, degree)


@dataclass(frozen=True)
class LaneCache:
    """A lane's KV cache, token by token.

    A token's *slot* is the number of its physical block times the lane's tokens in a block, and its place in the block:
    vLLM's slot mapping, which holds even if kernels see smaller blocks.

    Args:
        parts: for each layer one tensor or more `[blocks, heads, tokens in a block, size]`, views of the KV memory.
        heads: which of the model's KV heads those are.
        block_tokens: tokens in a block of the lane.
    """

    parts: Sequence[torch.Tensor]
    heads: range
    block_tokens: int

    @property
    def like(self) -> torch.Tensor:
        """Some part: size, dtype and device are those of all."""
        return self.parts[0]

    def slots(self, runs: Sequence[tuple[Sequence[int], range]]) -> torch.Tensor:
        """Where tokens lie: for each request its physical blocks, and which of its tokens are meant."""
        found = [torch.empty(0, dtype=torch.long)]
        for blocks, tokens in runs:
            position = torch.arange(tokens.start, tokens.stop)
            block = torch.tensor(blocks, dtype=torch.long)[position // self.block_tokens]
            found.append(block * self.block_tokens + position % self.block_tokens)
        return torch.cat(found).to(self.like.device)

    def read(self, part: int, slots: torch.Tensor) -> torch.Tensor:
        """What one part has of some tokens, `[tokens, heads, size]`."""
        cache = self.parts[part]
        return cache[slots // cache.shape[2], :, slots % cache.shape[2]]

    def write(self, part: int, slots: torch.Tensor, heads: range, values: torch.Tensor) -> None:
        """Keep the heads of this lane of `values`, `[tokens, heads, size]`, which are of the model's `heads`."""
        first, last = max(heads.start, self.heads.start), min(heads.stop, self.heads.stop)
        if first < last:
            cache = self.parts[part][:, first - self.heads.start : last - self.heads.start]
            mine = values[:, first - heads.start : last - heads.start]
            cache[slots // cache.shape[2], :, slots % cache.shape[2]] = mine


def exchange(
    broadcast: Broadcast,
    like: LaneCache,
    count: int,
    senders: Sequence[tuple[int, range]],
    mine: tuple[int, LaneCache, torch.Tensor] | None,
    target: tuple[LaneCache, torch.Tensor] | None,
) -> None:
    """Bring the KV of `count` tokens from one lane to another. Every rank of the cover calls it.

    Args:
        broadcast: among the cover's ranks.
        like: any lane's cache: how many parts there are, and what they are made of.
        count: tokens.
        senders: rank and heads of those that have the KV; who has only heads of an earlier one is not asked.
        mine: on these: this rank, its lane, and the tokens' slots.
        target: on ranks of the new group: the lane, and the slots to fill.
    """
    told: set[int] = set()
    for rank, heads in senders:
        if told.issuperset(heads):
            continue
        told.update(heads)
        for parts in _pieces(like, count * len(heads)):
            shape = (len(parts), count, len(heads), like.like.shape[3])
            values = torch.empty(shape, dtype=like.like.dtype, device=like.like.device)
            if mine is not None and mine[0] == rank:
                for n, part in enumerate(parts):
                    values[n] = mine[1].read(part, mine[2])
            values = broadcast(values, rank)
            if target is not None:
                for n, part in enumerate(parts):
                    target[0].write(part, target[1], heads, values[n])


def _pieces(cache: LaneCache, rows: int) -> Iterator[range]:
    """Runs of parts that fit into PIECE_BYTES, with the rows of each."""
    part_bytes = max(1, rows * cache.like.shape[3] * cache.like.element_size())
    step = max(1, PIECE_BYTES // part_bytes)
    for first in range(0, len(cache.parts), step):
        yield range(first, min(first + step, len(cache.parts)))
