"""Weights of a model that move into an arena of a CUDA device, where a group can lend their pages.

Not run on CUDA: see docs/design/cuda.md.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.weights.cuts import column_segments, row_segment, vocabulary_segment
from flying_serving.weights.expert_forms import expert_tensors, expert_weights
from flying_serving.weights.lending.device_pages import DevicePages
from flying_serving.weights.unit_order import UnitOrder


class Placement:
    """The places of a model's weights in an arena. This worker is `rank` in the widest group, of
    `widest` engines.
    """

    def __init__(self, pages: DevicePages, rank: int, widest: int) -> None:
        self.pages = pages
        self._rank = rank
        self._widest = widest

    def place(self, model: Module) -> None:
        """Move the weights of all layers that groups cut, of lane 1's model, which is loaded.

        Columns of a row-parallel weight are scattered over its pages, so its transpose is placed.
        The weights are those of before, as tensors of the same shapes.

        Raises:
            DeviceMemory: if the device has no room beside a weight for its copy.
        """
        placed: set[int] = set()
        for name, layer in model.named_modules():
            weight = getattr(layer, "weight", None)
            if weight is None or id(weight) in placed or not _is_cut(layer):
                continue
            placed.add(id(weight))  # an embedding and its head may have one weight
            if isinstance(layer, RowParallelLinear):
                segments: Sequence[Segment] = (row_segment(name, layer, self._widest),)
                weight.data = self._placed(weight.data.t(), segments).t()
            else:
                weight.data = self._placed(weight.data, self._segments_of(name, layer))
            _free_unused(weight)

    def place_units(self, units: Sequence[Module]) -> None:
        """Move the weights of routed experts, of which each rank of the widest group has a unit.

        Raises:
            WeightError: for quantized experts. Kernels of CUDA keep them in objects of their own,
                which would not be moved.
        """
        for rank, unit in enumerate(units):
            if any(key.endswith("_scale") for key in expert_tensors(unit)):
                raise WeightError("--lend-weights: quantized experts cannot be lent on this device")
            for weight in expert_weights(unit):
                kept = [slice(0, weight.shape[0])] if rank == self._rank else []
                weight.data = self.pages.place(weight.data, kept)
                _free_unused(weight)

    def _segments_of(self, name: str, layer: Any) -> Sequence[Segment]:
        if isinstance(layer, ColumnParallelLinear):
            return column_segments(name, layer, self._widest)
        return (vocabulary_segment(name, layer, self._widest),)

    def _placed(self, weight: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """Place a weight of which each unit is a run of rows, in the order of `keep_by_unit`."""
        return self.pages.place(weight, UnitOrder(segments).rows_of(self._rank, self._widest).runs)


def _is_cut(layer: Module) -> bool:
    if isinstance(layer, LinearBase):
        cut = isinstance(layer, ColumnParallelLinear | RowParallelLinear) and not layer.disable_tp
        return cut and isinstance(layer.quant_method, UnquantizedLinearMethod)
    return isinstance(layer, VocabParallelEmbedding)


def _free_unused(weight: torch.Tensor) -> None:
    """Give the memory of a moved weight back to the device: torch keeps it for other tensors."""
    if weight.is_cuda:
        torch.cuda.empty_cache()
