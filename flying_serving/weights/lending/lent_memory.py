"""Memory of a device that changes owner: weights that its widest lane does not need, and KV blocks
in their place.

The functions are called on the workers of one engine, through vLLM's `collective_rpc`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig

from flying_serving.memory.arena import PagedMemory
from flying_serving.vllm_adapter.model_runner.lane import Lane
from flying_serving.weights.lending.residency import WorkerWeights


class ExtraBlocks:
    """The KV memory of a device behind all lanes: `memory` (int8), laid out as in `kv`, `arena` the
    same memory.

    `lanes`: all of the device, which know the blocks of running requests.
    """

    def __init__(
        self, memory: torch.Tensor, kv: KVCacheConfig, arena: PagedMemory, lanes: Iterable[Lane]
    ) -> None:
        self._memory = memory
        self._kv = kv
        self._arena = arena
        self._lanes = list(lanes)
        self.page_bytes = arena.page_bytes

    @torch.inference_mode()
    def copy(self, copies: Mapping[int, int]) -> None:
        """Copy blocks, all layers, to others (`copies`: new ones by old), and give running requests
        the new ones.
        """
        old, new = list(copies), list(copies.values())
        for layers in layer_blocks(self._memory, self._kv):
            layers[:, new] = layers[:, old]
        for lane in self._lanes:
            lane.replace_blocks(copies)

    def back(self, blocks: range) -> None:
        """Let there be pages for some blocks again."""
        for extent in extents(self._kv, blocks):
            self._arena.back(*extent)

    def release(self, blocks: range) -> int:
        """Return the pages of some blocks to the system. Returns their bytes."""
        return sum(self._arena.release(*extent) for extent in extents(self._kv, blocks))


@dataclass(frozen=True)
class LentMemory:
    """The parts of a device that exchange memory. `widest`: engines in the group that lends.
    `own_blocks`: KV blocks without any lent weights.
    """

    weights: WorkerWeights
    widest: int
    own_blocks: int
    extra: ExtraBlocks


class Lends(Protocol):
    """The member of a worker that lending needs: None where nothing is lent."""

    lent: LentMemory | None


def _lent(worker: Lends) -> LentMemory:
    assert worker.lent is not None
    return worker.lent


def lendable(worker: Lends) -> tuple[list[int], int, int]:
    """Return the bytes of each piece of weights, in the order of their dropping, the first extra
    block, and the bytes of a page.
    """
    lent = _lent(worker)
    return lent.weights.piece_bytes(lent.widest), lent.own_blocks, lent.extra.page_bytes


def own_blocks_of(kv: KVCacheConfig, own_bytes: int) -> int:
    """Return the blocks that an engine has without any lent weights, of KV memory of which
    `own_bytes` are its own.
    """
    size_bytes = kv.kv_cache_tensors[0].size
    return min(kv.num_blocks, own_bytes * kv.num_blocks // size_bytes)


def drop_next(worker: Lends, blocks: range) -> None:
    """Drop the next piece of weights, and back some extra blocks with pages in its place."""
    lent = _lent(worker)
    lent.weights.drop_next(lent.widest)
    lent.extra.back(blocks)


def fetch_next(worker: Lends) -> None:
    """Fetch back the piece of weights that was dropped last."""
    _lent(worker).weights.fetch_next()


def copy_blocks(worker: Lends, copies: Mapping[int, int]) -> None:
    """Copy KV blocks to others, as `ExtraBlocks.copy` does."""
    _lent(worker).extra.copy(copies)


def release_blocks(worker: Lends, blocks: range) -> None:
    """Release the pages of KV blocks, as `ExtraBlocks.release` does."""
    _lent(worker).extra.release(blocks)


def layer_blocks(memory: torch.Tensor, kv: KVCacheConfig) -> Sequence[torch.Tensor]:
    """Return the KV memory as tensors [layers, blocks, bytes of a block in a layer], layers of one
    size in each.
    """
    found = []
    for tensor in kv.kv_cache_tensors:
        page = min(tensor.layer_stride, tensor.block_stride)
        shape = len(tensor.layers), kv.num_blocks_of(tensor), page
        found.append(
            memory.as_strided(shape, (tensor.layer_stride, tensor.block_stride, 1), tensor.offset)
        )
    return found


def extents(kv: KVCacheConfig, blocks: range) -> list[tuple[int, int]]:
    """Return where consecutive blocks lie: first byte and size of each region, as large as
    possible. Each layer has a region of its own, or a block has all layers.
    """
    found = set()
    for tensor in kv.kv_cache_tensors:
        first, size = blocks.start * tensor.block_stride, len(blocks) * tensor.block_stride
        if tensor.layer_stride > tensor.block_stride:
            found |= {
                (tensor.offset + layer * tensor.layer_stride + first, size)
                for layer in range(len(tensor.layers))
            }
        else:
            found.add((first, size))
    return sorted(found)
