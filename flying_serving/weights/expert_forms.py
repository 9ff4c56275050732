"""The forms in which vLLM loads routed experts, and how an expert is cut in each.

An expert of d columns has gate and up of d rows each (`w13_*`), and a down projection of d columns
(`w2_*`). A unit has some of the columns, with their rows of gate and up.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from flying_serving.errors import WeightError
from flying_serving.vllm_adapter.weights.expert_kernels import KERNEL, kernel_name, takes_strides
from flying_serving.weights.formats import FP8_ROUNDING

METHODS = ("gpt_oss_mxfp4",)
"""Values of vLLM's `quantization` of which the experts have a form, and other layers none."""
MXFP4_BLOCK = 32
"""Numbers of a row that share a scale, and are cut together."""


@dataclass(frozen=True)
class ExpertForm:
    """One form of experts.

    Args:
        columns: returns the columns of each expert in one unit. Arguments are the name of a layer
            of lane 1, the layer, and the number of units. Raises WeightError, naming the layer, if
            there are no such units.
        pads: vLLM pads the experts of a layer with zeros where its kernel asks for more columns.
        method: returns a method of vLLM's for a unit, which looks like the layer of a lane. None:
            vLLM processes all experts together as it loads, and lanes have slices of them.
        backend: a value of --moe-backend whose kernel does not route tokens itself.
        input_rounding: see `Format`.
    """

    columns: Callable[[str, Any, int], int]
    pads: bool
    method: Callable[[Any], Any] | None
    backend: str = KERNEL
    input_rounding: float = 0.0


def form_of(name: str, layer: Any) -> ExpertForm:
    """Return the form of a layer's experts. Raises WeightError, naming the layer, for experts that
    cannot be cut into units.
    """
    form = FORMS.get(type(layer.quant_method).__name__)
    if form is None:
        raise WeightError(f"{name}: quantized experts cannot be shared between lanes")
    return form


def is_ready(layer: Any) -> bool:
    """Return whether vLLM has made a layer's experts ready for their kernel as it loaded them. The
    others are kept as they were loaded (`loading.finish_experts`).
    """
    form = FORMS.get(type(layer.quant_method).__name__)
    return form is None or form.method is None


def expert_tensors(layer: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the tensors of a layer that have a part for each expert: weights, scales, biases."""
    parameters = dict(layer.named_parameters(recurse=False))
    return {key: value for key, value in parameters.items() if key.startswith(("w13_", "w2_"))}


def expert_weights(layer: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of all experts of a layer that a group may drop: all but biases."""
    tensors = expert_tensors(layer)
    return [tensor for key, tensor in tensors.items() if not key.endswith("_bias")]


def unit_tensor(
    name: str, full: torch.Tensor, shape: torch.Size, columns: range, layer: Any
) -> torch.Tensor:
    """Return a unit's part of one tensor of all experts, in memory of its own.

    Args:
        name: of the tensor in its layer.
        full: the tensor of lane 1, with the experts in its first dimension.
        shape: that of the tensor in a layer of the widest lane, which may be padded.
        columns: of each expert that the unit has. The last ones may be beyond the expert's.
        layer: lane 1's.
    """
    if name == "w2_bias":
        # it belongs to the sum over all ranks: once is enough
        return full.clone() if columns.start == 0 else torch.zeros_like(full)
    if name.startswith("w13_"):
        interleaved = is_interleaved(layer)
        pairs = full.unflatten(1, (-1, 2) if interleaved else (2, -1))
        return _part(pairs, 1 if interleaved else 2, columns, shape[1] // 2).flatten(1, 2)
    # scales, and packed numbers, stand for several columns each
    share = layer.w13_weight.shape[1] // 2 // full.shape[2]
    some = range(columns.start // share, columns.stop // share)
    return _part(full, 2, some, shape[2])


def is_interleaved(layer: Any) -> bool:
    """Return whether each row of the gate is followed by its row of up. Usually all rows of the
    gate come first.
    """
    activation: MoEActivation = layer.activation
    return activation is MoEActivation.SWIGLUOAI


def _part(tensor: torch.Tensor, axis: int, places: range, size: int) -> torch.Tensor:
    """Return a copy of some places of a dimension, with zeros behind them up to `size`."""
    sizes = list(tensor.shape)
    stop = min(places.stop, sizes[axis])
    start = min(places.start, stop)
    sizes[axis] = size
    part = tensor.new_zeros(sizes)
    part.narrow(axis, 0, stop - start).copy_(tensor.narrow(axis, start, stop - start))
    return part


def _even_columns(name: str, layer: Any, units: int) -> int:
    columns: int = layer.w2_weight.shape[2]
    if columns % units:
        raise WeightError(f"{name}: {columns} columns of an expert do not divide by {units}")
    return columns // units


def _columns_of_blocks(name: str, layer: Any, units: int) -> int:
    """Return whole blocks: the last units may have fewer, or none, as vLLM's last ranks have."""
    columns: int = layer.moe_config.intermediate_size_per_partition_unpadded
    blocks = -(-columns // (units * MXFP4_BLOCK))
    return blocks * MXFP4_BLOCK


def _fp8_columns(name: str, layer: Any, units: int) -> int:
    """Return equally many columns, which share no scale with those of another unit."""
    method = layer.quant_method
    if not takes_strides(method):
        raise WeightError(
            f"{name}: lanes share experts in FP8 by vLLM's kernel TRITON alone, and this one is "
            f"{kernel_name(method)} (--moe-backend {KERNEL})"
        )
    columns = _even_columns(name, layer, units)
    block = getattr(method, "moe_block_shape", getattr(method, "weight_block_size", None))
    for size in block or ():
        if columns % size:
            raise WeightError(
                f"{name}: a unit of {columns} columns of an expert is no multiple of {size}, the "
                "size of the blocks with one scale"
            )
    return columns


_FP8 = ExpertForm(_fp8_columns, pads=False, method=None, input_rounding=FP8_ROUNDING)
FORMS: dict[str, ExpertForm] = {
    "UnquantizedFusedMoEMethod": ExpertForm(
        _even_columns,
        pads=False,
        method=lambda unit: UnquantizedFusedMoEMethod(unit.moe_config),
    ),
    "GptOssMxfp4MoEMethod": ExpertForm(
        _columns_of_blocks,
        pads=True,
        # the method of a layer knows the sizes of its weights, and has no kernel yet
        method=lambda unit: copy.copy(unit.quant_method),
        backend="marlin",
    ),
    "Fp8MoEMethod": _FP8,
    "CompressedTensorsW8A8Fp8MoEMethod": _FP8,
}
"""Each form by the name of vLLM's method for it, which turns it into the format of a kernel."""
