"""KV memory of a device as numbers of a flat array: where each token's values are in each lane,
worked out by hand.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from flying_serving.layout.shards import lane_block_tokens
from flying_serving.memory.arena import Arena
from flying_serving.memory.kv_view import KVView


@dataclass(frozen=True)
class Kind:
    """How an engine's KV memory is laid out.

    Args:
        transposed: tokens of keys are in the last dimension, as in vLLM's CPU kernels.
        interleaved: a block's layers lie side by side; else a layer's blocks do.
        cuts: into how many kernel blocks a block of a group's lane is cut.
    """

    transposed: bool = False
    interleaved: bool = False
    cuts: int = 1


@dataclass(frozen=True)
class Model:
    """What is kept of a token, and by how many devices of an engine; a block of lane 1 has
    `block_tokens`. `fewest_heads`: of other layers, which have fewer KV heads; 0: there are none.
    """

    kv_heads: int
    devices: int = 1
    layers: int = 3
    head_size: int = 2
    block_tokens: int = 4
    kind: Kind = Kind()
    fewest_heads: int = 0

    def tokens(self, size: int) -> int:
        """Tokens in a block of a lane."""
        heads = self.fewest_heads or self.kv_heads
        return lane_block_tokens(self.block_tokens, size, self.devices, heads)

    def heads(self, size: int, rank: int) -> list[int]:
        """Heads that a rank of a lane has, by going through all of them."""
        degree = self.devices * size
        if self.kv_heads < degree:
            return [rank * self.kv_heads // degree]
        return [head for head in range(self.kv_heads) if head * degree // self.kv_heads == rank]

    def value(self, layer: int, token: int, head: int, component: int) -> int:
        """What is kept of a token: nothing else is the same."""
        return 1 + (((layer * 4096 + token) * 16 + head) * 2 * self.head_size) + component


class Memory:
    """A device's KV memory, and where in it each token's values are. No value is that of a token at
    first.

    Args:
        arena: where it is; else it is nowhere that peers could see.
        first_byte: of it in the arena, behind the memory of other layers.
    """

    def __init__(
        self,
        model: Model,
        blocks: int,
        seed: int = 0,
        arena: Arena | None = None,
        first_byte: int = 0,
    ) -> None:
        self.model, self.blocks, self.first = model, blocks, first_byte // 8
        self.page = self.size_bytes(model, 1) // model.layers // 8
        self.values = -np.random.default_rng(seed).integers(
            1, 1 << 30, self.size_bytes(model, blocks) // 8
        )
        if arena is not None:
            values = np.frombuffer(arena.bytes, dtype=np.int64)
            values[self.first : self.first + len(self.values)] = self.values
            self.values = values

    @staticmethod
    def size_bytes(model: Model, blocks: int) -> int:
        """Of all blocks, in numbers of eight bytes."""
        page = model.block_tokens * max(1, model.kv_heads // model.devices) * 2 * model.head_size
        return 8 * model.layers * blocks * page

    def cuts(self, size: int) -> int:
        """Kernel blocks in a block of a lane."""
        return 1 if size == 1 else self.model.kind.cuts

    def view(self, size: int, rank: int) -> KVView:
        """A lane's cache, made of views as vLLM makes them."""
        model, tokens, cuts = self.model, self.model.tokens(size), self.cuts(size)
        heads = model.heads(size, rank)
        inner, width = tokens // cuts, 2 * model.head_size
        parts = []
        for layer in range(model.layers):
            strides = (self._block_stride // cuts, inner * width, width, 1)
            shape = (self.blocks * cuts, len(heads), inner, width)
            view = torch.from_numpy(self.values).as_strided(
                shape, strides, self.first + layer * self._layer_stride
            )
            parts += self._transposed(view) if model.kind.transposed else [view]
        return KVView(parts, range(heads[0], heads[-1] + 1), tokens, model.kv_heads)

    @staticmethod
    def _transposed(cache: torch.Tensor) -> list[torch.Tensor]:
        blocks, heads, tokens, width = cache.shape
        half, (by_block, by_head, _, _) = width // 2, cache.stride()
        keys = cache.as_strided((blocks, heads, tokens, half), (by_block, by_head, 1, tokens))
        start = cache.storage_offset() + tokens * half
        return [
            keys,
            cache.as_strided((blocks, heads, tokens, half), (by_block, by_head, half, 1), start),
        ]

    @property
    def _block_stride(self) -> int:
        return self.page * self.model.layers if self.model.kind.interleaved else self.page

    @property
    def _layer_stride(self) -> int:
        return self.page if self.model.kind.interleaved else self.page * self.blocks

    def places(
        self,
        size: int,
        rank: int,
        blocks: Sequence[int],
        tokens: range,
        heads: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, int]]:
        """Where values of tokens are in a lane, of all of its heads or some, and which."""
        model, mine = self.model, self.model.heads(size, rank)
        for token, head in product(tokens, mine if heads is None else heads):
            block, place = divmod(token, model.tokens(size))
            for layer, component in product(range(model.layers), range(2 * model.head_size)):
                at = self.first + layer * self._layer_stride
                at += blocks[block] * self._block_stride
                at += self._in_page(size, place, mine.index(head), len(mine), component)
                yield at, model.value(layer, token, head, component)

    def _in_page(self, size: int, place: int, head: int, heads: int, component: int) -> int:
        half, inner = self.model.head_size, self.model.tokens(size) // self.cuts(size)
        cut, n = divmod(place, inner)
        start = (cut * heads + head) * inner * 2 * half
        if not self.model.kind.transposed:
            return start + n * 2 * half + component
        return start + (
            component * inner + n if component < half else (inner + n) * half + component - half
        )

    def write(self, size: int, rank: int, blocks: Sequence[int], tokens: range) -> None:
        """Put what belongs to tokens there."""
        for at, value in self.places(size, rank, blocks, tokens):
            self.values[at] = value

    def has(self, size: int, rank: int, blocks: Sequence[int], tokens: range) -> bool:
        """Whether all that belongs to tokens is there."""
        return all(
            self.values[at] == value for at, value in self.places(size, rank, blocks, tokens)
        )
