"""Weights of a model that move into an arena of a CUDA device, where a group can lend their pages.

Not run on CUDA: see docs/design/cuda.md.
"""

from collections.abc import Sequence

import torch
from torch.nn import Module, Parameter

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.weights.expert_forms import expert_tensors, expert_weights
from flying_serving.weights.lending.device_pages import DevicePages
from flying_serving.weights.unit_order import UnitOrder


class ArenaPlacement:
    """The places of a model's weights in an arena. This worker is `rank` in the widest group, of
    `widest` engines.
    """

    def __init__(self, pages: DevicePages, rank: int, widest: int) -> None:
        self.pages = pages
        self._rank = rank
        self._widest = widest

    def place(
        self, weight: Parameter, segments: Sequence[Segment], *, by_columns: bool = False
    ) -> None:
        """Move a weight that groups cut, as a tensor of the same shape. Once: an embedding and its
        head may have one weight.

        Each unit will be a run of rows, in the order of `keep_by_unit`. If it is one of columns
        (`by_columns`), which would be scattered over the pages, the transpose is placed.

        Raises:
            DeviceMemory: if the device has no room beside the weight for its copy.
        """
        if self.pages.holds(weight) or all(segment.units == 1 for segment in segments):
            return
        kept = UnitOrder(segments).rows_of(self._rank, self._widest).runs
        if by_columns:
            weight.data = self.pages.place(weight.data.t(), kept).t()
        else:
            weight.data = self.pages.place(weight.data, kept)
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


def _free_unused(weight: torch.Tensor) -> None:
    """Give the memory of a moved weight back to the device: torch keeps it for other tensors."""
    if weight.is_cuda:
        torch.cuda.empty_cache()
