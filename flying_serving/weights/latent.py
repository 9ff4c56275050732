"""Latent attention (MLA) in lanes: matrices that vLLM takes from the projection of latents when it
has loaded a model.
"""

from collections.abc import Mapping
from typing import cast

import torch
from torch.nn import Module, Parameter
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear

from flying_serving.errors import WeightError
from flying_serving.weights.cuts import column_bias, column_segments
from flying_serving.weights.formats import is_quantized
from flying_serving.weights.plain import part_of
from flying_serving.weights.storage import StridedColumns

ABSORBED = ("W_UK_T", "W_UV")
"""The parts of `kv_b_proj` for keys and for values, heads first. Decode steps multiply with them in
place of the projection.
"""


def absorb(model: Module, dtype: torch.dtype) -> None:
    """Let vLLM take these matrices from the projections of a model without weights, as it does at
    the end of loading. Raises WeightError if a backend would pack them.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, MLAAttention):
            if layer.is_amx_bmm_enabled:
                raise _packs(name, layer)
            layer.process_weights_after_loading(dtype)


def latent_projections(model: Module) -> set[int]:
    """Return the ids of the projections whose weight latent attention reads as it was loaded.

    Packing one would be a second copy of it. vLLM does not pack them either. Raises as
    `refuse_latent`.
    """
    found = set()
    for name, layer in model.named_modules():
        if isinstance(layer, MLAAttention):
            refuse_latent(name, layer)
            found.add(id(layer.kv_b_proj))
    return found


def refuse_latent(name: str, layer: MLAAttention) -> None:
    """Raise WeightError for an attention layer that lanes cannot share.

    Its backend may keep these matrices in a format of its own, or have no kernel for a token's
    vector of this size. Or the projection is quantized.
    """
    backend = layer.attn_backend
    sizes = backend.get_supported_head_sizes()
    if sizes and layer.head_size not in sizes:
        raise WeightError(
            f"{name}: the attention backend {backend.get_name()} has no kernel for a latent and a "
            f"rotated key of {layer.head_size} numbers ({', '.join(map(str, sizes))})"
        )
    if is_quantized(layer.kv_b_proj):
        raise WeightError(f"{name}: a quantized projection of latents cannot be shared yet")
    if any(getattr(layer, key, None) is None for key in ABSORBED):
        raise _packs(name, layer)


def _packs(name: str, layer: MLAAttention) -> WeightError:
    return WeightError(
        f"{name}: the attention backend {layer.attn_backend.get_name()} packs the projection of "
        "latents, so lanes cannot share it; on a CPU try --attention-backend CPU_MLA"
    )


def whole_columns(name: str, layer: ColumnParallelLinear, widest: int) -> StridedColumns:
    """Return the storage of such a projection: its weight as it was loaded."""
    bias = column_bias(layer)
    data = None if bias is None else bias.data
    return StridedColumns(layer.weight.data, data, column_segments(name, layer, widest))


def bind_latents(model: Module, full: Mapping[str, Module], rank: int, degree: int) -> None:
    """Give each attention layer of a lane its heads of lane 1's matrices. `full`: lane 1's layers
    by name. Raises as `_bind_latent`.
    """
    for name, layer in model.named_modules():
        if degree > 1 and isinstance(layer, MLAAttention):
            _bind_latent(name, layer, cast(MLAAttention, full[name]), rank, degree)


def _bind_latent(
    name: str, layer: MLAAttention, full: MLAAttention, rank: int, degree: int
) -> None:
    """Give a lane's layer its heads of lane 1's matrices. Raises WeightError if the heads do not
    divide.
    """
    for key in ABSORBED:
        whole = getattr(full, key)
        shape = whole.detach()[: layer.num_heads].shape
        part = part_of(f"{name}.{key}", whole.detach(), shape, rank, degree)
        layer.register_parameter(key, Parameter(part, requires_grad=False))
