"""Routed experts that stay whole: lanes have slices of them, and one launch of a kernel.

vLLM's Triton kernel takes strides. The rows of gate and up are reordered once, in place: unit by
unit, as those of a dense fused layer (`weights/unit_order.py`). For two units of an expert:

    loaded:  gate0 gate1 up0 up1
    kept:    gate0 up0 gate1 up1

A lane's part of `w13_*` is then one run of rows, and its part of `w2_*` one run of columns.
"""

from typing import Any

import torch
from torch.nn import Parameter

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.vllm_adapter.weights.expert_kernels import (
    kernel_name,
    set_kernel,
    takes_strides,
)
from flying_serving.weights.expert_forms import expert_tensors, form_of, is_interleaved
from flying_serving.weights.unit_order import keep_by_unit

ROWS, COLUMNS = 1, 2
"""Dimensions of a tensor of all experts: (experts, rows, columns)."""


class WholeExperts:
    """All experts of a layer of lane 1, whose rows are changed in place. `units`: of the widest
    lane.

    Raises:
        WeightError: naming the layer, if they cannot be cut into units.
    """

    def __init__(self, name: str, full: Any, units: int) -> None:
        form_of(name, full).columns(name, full, units)
        self._name, self._units = name, units
        self._tensors = {key: tensor.data for key, tensor in expert_tensors(full).items()}
        # gate and up are one segment where their rows alternate, or where there is no gate
        segments = 1 if is_interleaved(full) else full.moe_config.w13_num_shards
        self._is_fused = segments > 1
        if self._is_fused:
            for key, tensor in self._tensors.items():
                if _cut_dim(key, tensor) == ROWS:
                    _keep_by_unit(tensor, segments, units)
        bias = self._tensors.get("w2_bias")
        self._no_bias = None if bias is None else torch.zeros_like(bias)

    def install(self, layer: Any, rank: int, degree: int) -> None:
        """Let a layer of a lane, or lane 1's own, multiply with the part of `rank` of `degree`.

        Raises:
            WeightError: if vLLM has chosen another kernel for the lane, or other shapes.
        """
        method = layer.quant_method
        if not takes_strides(method):
            raise WeightError(
                f"{self._name}: the kernel of groups of {degree} is {kernel_name(method)}, and "
                "that of an engine alone takes slices of weights"
            )
        units = Segment(self._units, self._units).units_of(rank, degree)
        for key in self._tensors:
            part = self._part(key, units)
            self._refuse_other(key, part, getattr(layer, key))
            layer.register_parameter(key, Parameter(part, requires_grad=False))
        set_kernel(method, layer, len(units) if self._is_fused else 1)

    def _part(self, key: str, units: range) -> torch.Tensor:
        """Return a view of a tensor: the rows or columns of some units."""
        tensor = self._tensors[key]
        if key == "w2_bias" and units.start > 0:
            # it belongs to the sum over all ranks: once is enough
            assert self._no_bias is not None
            return self._no_bias
        dim = _cut_dim(key, tensor)
        if dim is None:
            return tensor
        size = tensor.shape[dim] // self._units
        return tensor.narrow(dim, units.start * size, len(units) * size)

    def _refuse_other(self, key: str, part: torch.Tensor, own: torch.Tensor) -> None:
        """Raise WeightError if a lane's own weight has another number of rows or columns."""
        dim = _cut_dim(key, self._tensors[key])
        if key.endswith("_weight") and dim is not None and own.shape[dim] != part.shape[dim]:
            what = "rows" if dim == ROWS else "columns"
            raise WeightError(
                f"{self._name}.{key}: {own.shape[dim]} {what} in a lane, {part.shape[dim]} of "
                "lane 1's"
            )


def _cut_dim(key: str, tensor: torch.Tensor) -> int | None:
    """Return the dimension of a tensor along which experts are cut; None: it is whole in each lane,
    as scales of whole experts and of inputs are.
    """
    if key.startswith("w13_"):
        return ROWS if tensor.dim() > COLUMNS or key == "w13_bias" else None
    # the scales of outputs are of all columns
    return COLUMNS if tensor.dim() > COLUMNS and tensor.shape[COLUMNS] > 1 else None


def _keep_by_unit(tensor: torch.Tensor, segments: int, units: int) -> None:
    """Reorder the rows of each expert in place."""
    order = [Segment(tensor.shape[ROWS] // segments, units)] * segments
    for expert in tensor:
        keep_by_unit(expert if expert.dim() > 1 else expert.unsqueeze(1), order)
