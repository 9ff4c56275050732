"""A lane's KV cache, token by token, in this process or in a peer (torch, no vLLM).

A lane has a `KVView` for each kind of layers. Layers are of a kind if their KV has the same size
and the same number of heads. All lanes of a model have the same kinds in the same order.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from mmap import mmap

import msgspec
import torch

from flying_serving.layout.shards import Segment
from flying_serving.memory.arena import Address, map_peer
from flying_serving.memory.copiers import copy_tiles
from flying_serving.memory.cuda_device import CudaDevice
from flying_serving.memory.cuda_ipc import map_cuda
from flying_serving.memory.shared_arena import SharedArena, map_arena
from flying_serving.memory.states import Place, StateCut, copy_states
from flying_serving.memory.tiles import TileCopy, tile_numbers


def heads_of(rank: int, degree: int, kv_heads: int) -> range:
    """Return the model's KV heads that a rank of a lane has; ranks beyond their number share
    one.
    """
    return Segment(kv_heads, kv_heads).units_of(rank, degree)


class PartShape(msgspec.Struct, frozen=True, array_like=True):
    """A part of a `KVView` as `torch.as_strided` takes it, in elements of `dtype`."""

    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, part: torch.Tensor) -> "PartShape":
        """Return the shape of a part."""
        dtype = str(part.dtype).removeprefix("torch.")
        return cls(dtype, part.storage_offset(), tuple(part.shape), part.stride())

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the part in a peer's memory (int8)."""
        typed = memory.view(getattr(torch, self.dtype))
        return typed.as_strided(self.shape, self.stride, self.offset)


class ViewShape(msgspec.Struct, frozen=True):
    """A `KVView` without its memory: the parts, and the first of its heads and the one after the
    last.
    """

    parts: list[PartShape]
    heads: tuple[int, int]
    block_tokens: int
    kv_heads: int
    states: list[PartShape] = []


class KVAddress(msgspec.Struct, frozen=True):
    """The KV memory of a device, and the views of its lanes by group size.

    On CUDA `memory` is the result of `share_cuda`, or an arena.
    """

    memory: Address | SharedArena | bytes
    lanes: dict[int, list[ViewShape]]


@dataclass(frozen=True)
class KVView:
    """The KV cache of a lane on one device, of layers that are alike.

    `parts`: for each layer one tensor or more `[blocks, heads, tokens in a block, size]`, views of
    the KV memory. Where kernels see smaller blocks, each block is several in a row there. `heads`:
    the range of the model's KV heads in them, of the `kv_heads` that these layers have. `states`:
    recurrent states of layers, whose first dimension is the blocks; all in the first view of a
    lane. `cuts`: how ranks share them, which is not known of a peer's.
    """

    parts: Sequence[torch.Tensor]
    heads: range
    block_tokens: int
    kv_heads: int
    states: Sequence[torch.Tensor] = ()
    cuts: Sequence[StateCut] = ()

    def shape(self) -> ViewShape:
        """Return the view without its memory, which a peer needs to read it."""
        parts, states = ([PartShape.of(part) for part in of] for of in (self.parts, self.states))
        heads = self.heads.start, self.heads.stop
        return ViewShape(parts, heads, self.block_tokens, self.kv_heads, states)

    @classmethod
    def over(cls, memory: torch.Tensor, shape: ViewShape) -> "KVView":
        """Return a view of a peer's memory (int8)."""
        parts, states = ([part.over(memory) for part in of] for of in (shape.parts, shape.states))
        return cls(parts, range(*shape.heads), shape.block_tokens, shape.kv_heads, states)

    @cached_property
    def stacks(self) -> list[torch.Tensor]:
        """The parts `[layers, blocks, heads, tokens in a block, size]`; one tensor of all layers if
        possible.
        """
        kinds = 1 if len({part.stride() for part in self.parts[:2]}) == 1 else 2
        return [stack for kind in range(kinds) for stack in _stacked(self.parts[kind::kinds])]

    def zero(self, blocks: Sequence[int]) -> None:
        """Write zeros into some blocks. A kernel may read behind a request's last token, and what a
        state or another request has left there need not be a number.
        """
        for part in self.parts:
            ratio = self.block_tokens // part.shape[2]
            part[[block * ratio + i for block in blocks for i in range(ratio)]] = 0

    def copy(
        self,
        source: "KVView",
        heads: range,
        blocks: tuple[Sequence[int], Sequence[int]],
        tokens: range,
    ) -> None:
        """Copy some of the model's heads of tokens of one request from another lane.

        `blocks`: the request's blocks from its first token on, in the source and here. Whole tiles
        are copied, of which a block of either lane (of its kernels) is made. So some tokens behind
        the last one, which say nothing, are overwritten here.
        """
        if tokens:
            copy_tiles(self.tiles_from(source, heads, blocks, tokens))

    def copy_beside_kv(
        self,
        source: "KVView",
        places: tuple[Place, Place],
        blocks: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        """Copy the part that two ranks have in common of what a request has beside its KV.

        `places`: the source's and this one. `blocks`: `KVGroups.beside_kv` of the request there and
        here.
        """
        copy_states(self.cuts, (source.states, self.states), places, blocks)

    def tiles_from(
        self,
        source: "KVView",
        heads: range,
        blocks: tuple[Sequence[int], Sequence[int]],
        tokens: range,
    ) -> TileCopy:
        """Return the tiles that `copy` copies, for at least one token."""
        tile_tokens = math.gcd(source.parts[0].shape[2], self.parts[0].shape[2])
        source_stacks, target_stacks = source.stacks, self.stacks
        if [len(stack) for stack in source_stacks] != [len(stack) for stack in target_stacks]:
            source_stacks, target_stacks = (
                [part.unsqueeze(0) for part in view.parts] for view in (source, self)
            )
        pairs = zip(source_stacks, target_stacks, strict=True)
        return TileCopy(
            [(_of_heads(old, heads, source), _of_heads(new, heads, self)) for old, new in pairs],
            tile_numbers(blocks[0], source.block_tokens, tokens, tile_tokens),
            tile_numbers(blocks[1], self.block_tokens, tokens, tile_tokens),
            tile_tokens,
        )


def _of_heads(stack: torch.Tensor, heads: range, view: KVView) -> torch.Tensor:
    first = view.heads.start
    return stack[:, :, heads.start - first : heads.stop - first]


def _stacked(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return parts that lie at equal distances in one memory as one tensor, others each by
    itself.
    """
    first, offsets = parts[0], [part.storage_offset() for part in parts]
    distances = {after - before for before, after in pairwise(offsets)}
    alike = {
        (part.shape, part.stride(), part.dtype, part.untyped_storage().data_ptr()) for part in parts
    }
    if len(distances) > 1 or len(alike) > 1 or min(distances, default=0) < 0:
        return [part.unsqueeze(0) for part in parts]
    distance = distances.pop() if distances else 0
    return [
        first.as_strided(
            (len(parts), *first.shape), (distance, *first.stride()), first.storage_offset()
        )
    ]


def map_memory(
    memory: Address | SharedArena | bytes,
    whose: str,
    cuda: CudaDevice | None = None,
    reader: torch.device | None = None,
) -> torch.Tensor:
    """Map a peer's memory as int8. Raises PeerMemory if it cannot be mapped.

    `cuda`: the device of this process, for which an arena is mapped. `reader`: as in `map_cuda`.
    """
    if isinstance(memory, Address):
        return bytes_of(map_peer(memory, whose))
    if isinstance(memory, SharedArena):
        assert cuda is not None
        return map_arena(memory, whose, cuda)
    return map_cuda(memory, whose, reader)


def bytes_of(mapped: mmap) -> torch.Tensor:
    """Return mapped memory as an int8 tensor."""
    with warnings.catch_warnings():
        # a peer's memory is read only, which torch cannot say of a tensor
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(mapped, dtype=torch.int8)
