"""Latent attention (MLA) in lanes: matrices that vLLM takes from the projection of latents when it
has loaded a model.
"""

import torch
from torch.nn import Module, Parameter
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from flying_serving.errors import WeightError
from flying_serving.worker.binding.plain import part_of

ABSORBED = ("W_UK_T", "W_UV")
"""The parts of `kv_b_proj` for keys and for values, heads first. Decode steps multiply with them in
place of the projection.
"""


def absorb(model: Module, dtype: torch.dtype) -> None:
    """Let vLLM take these matrices from the projections of a model without weights, as it does at
    the end of loading.
    """
    for layer in model.modules():
        if isinstance(layer, MLAAttention):
            layer.process_weights_after_loading(dtype)


def latent_projections(model: Module) -> set[int]:
    """Return the ids of the projections whose weight latent attention reads as it was loaded.

    Packing one would be a second copy of it. vLLM does not pack them either.
    """
    return {id(layer.kv_b_proj) for layer in model.modules() if isinstance(layer, MLAAttention)}


def refuse_latent(name: str, layer: MLAAttention) -> None:
    """Raise WeightError if a backend keeps these matrices in a format of its own."""
    for key in ABSORBED:
        if getattr(layer, key, None) is None:
            raise WeightError(
                f"{name}: the attention backend {layer.attn_backend.get_name()} packs the "
                "projection of latents, so lanes cannot share it; on a CPU try "
                "--attention-backend CPU_MLA"
            )


def bind_latent(name: str, layer: MLAAttention, full: MLAAttention, rank: int, degree: int) -> None:
    """Give a lane's layer its heads of lane 1's matrices. Raises WeightError if the heads do not
    divide.
    """
    for key in ABSORBED:
        whole = getattr(full, key)
        shape = whole.detach()[: layer.num_heads].shape
        part = part_of(f"{name}.{key}", whole.detach(), shape, rank, degree)
        layer.register_parameter(key, Parameter(part, requires_grad=False))
