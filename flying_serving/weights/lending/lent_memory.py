"""Memory of a device that changes owner: weights that its widest lane does not need, and KV blocks
in their place.

The functions are called on the workers of one engine, through vLLM's `collective_rpc`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch.nn import Module
from vllm.v1.kv_cache_interface import KVCacheConfig

from flying_serving.config import Deployment
from flying_serving.errors import Unsupported
from flying_serving.memory.arena import PagedMemory
from flying_serving.vllm_adapter.kv.cache import has_kv_alone
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.weights.lending.residency import WorkerWeights, in_order, weight_file_of
from flying_serving.weights.units import Units


class ExtraBlocks:
    """The KV memory of a device behind all lanes: `memory` (int8), laid out as in `kv`, `arena` the
    same memory.

    `lanes`: all of the device, which know the blocks of running requests.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        kv: KVCacheConfig,
        arena: PagedMemory,
        lanes: Iterable[DeviceLane],
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


class LentMemory:
    """The memory that weights and KV of a device exchange. Nothing changes where no weight may be
    lent.

    `file`: keeps weights that may be lent; None: none may. `weights`: which of them are there.
    `widest`: engines in the group that lends. `extra`, `own_blocks`: KV blocks that get their
    memory, and the number of those without it.

    Raises Unsupported and WeightFileError as `weight_file_of`.
    """

    extra: ExtraBlocks

    def __init__(self, deployment: Deployment, engine: int, device: int) -> None:
        self.file = weight_file_of(deployment, engine, device)
        self.widest = deployment.widest
        self.weights = WorkerWeights((), engine)
        self.own_blocks = 0
        self._engine = engine

    def take(self, model: Module, units: Mapping[str, Sequence[Units]]) -> None:
        """Take the weights that all lanes share, `units` by layer of lane 1's `model`, and let
        other engines open their file.
        """
        if self.file is not None:
            self.file.announce()
            self.weights = WorkerWeights(in_order(model, units), self._engine)

    def open(self) -> None:
        """Open the file, when all engines have let others open theirs."""
        if self.file is not None:
            self.file.open()

    @property
    def most_bytes(self) -> int:
        """Bytes of weights that may make room for KV."""
        return sum(self.weights.piece_bytes(self.widest))

    def refuse(self, kv: KVCacheConfig) -> None:
        """Raise Unsupported if KV that gets the memory of weights would not be one arena."""
        if self.file is not None and not has_kv_alone(kv):
            raise Unsupported(
                "--lend-weights: the KV of this model is of several kinds: it gets no lent weights"
            )

    def take_kv(
        self,
        kv: KVCacheConfig,
        arena: PagedMemory | None,
        own_bytes: int,
        lanes: Mapping[int, DeviceLane],
    ) -> int:
        """Use the blocks beyond `own_bytes` of the KV memory of all lanes as extra ones, if weights
        may be lent. Return the number of blocks that have memory while all weights are there.
        """
        if self.file is None:
            return kv.num_blocks
        assert arena is not None
        self.own_blocks = own_blocks_of(kv, own_bytes)
        self.extra = ExtraBlocks(lanes[1].kv.memory(), kv, arena, lanes.values())
        return kv.num_blocks if arena.backs_on_use else self.own_blocks


class Lends(Protocol):
    """What lending needs of the lanes of a device."""

    lent: LentMemory


def lendable(lanes: Lends) -> tuple[list[int], int, int]:
    """Return the bytes of each piece of weights, in the order of their dropping, the first extra
    block, and the bytes of a page.
    """
    lent = lanes.lent
    return lent.weights.piece_bytes(lent.widest), lent.own_blocks, lent.extra.page_bytes


def own_blocks_of(kv: KVCacheConfig, own_bytes: int) -> int:
    """Return the blocks that an engine has without any lent weights, of KV memory of which
    `own_bytes` are its own.
    """
    size_bytes = kv.kv_cache_tensors[0].size
    return min(kv.num_blocks, own_bytes * kv.num_blocks // size_bytes)


def drop_next(lanes: Lends, blocks: range) -> None:
    """Drop the next piece of weights, and back some extra blocks with pages in its place."""
    lent = lanes.lent
    lent.weights.drop_next(lent.widest)
    lent.extra.back(blocks)


def fetch_next(lanes: Lends) -> None:
    """Fetch back the piece of weights that was dropped last."""
    lanes.lent.weights.fetch_next()


def copy_blocks(lanes: Lends, copies: Mapping[int, int]) -> None:
    """Copy KV blocks to others, as `ExtraBlocks.copy` does."""
    lanes.lent.extra.copy(copies)


def release_blocks(lanes: Lends, blocks: range) -> None:
    """Release the pages of KV blocks, as `ExtraBlocks.release` does."""
    lanes.lent.extra.release(blocks)


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
