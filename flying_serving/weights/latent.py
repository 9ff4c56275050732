"""Latent attention (MLA) in lanes: matrices that vLLM takes from the projection of latents when it
has loaded a model.
"""

from torch.nn import Parameter
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from flying_serving.errors import WeightError
from flying_serving.weights.formats import is_quantized
from flying_serving.weights.linear import ColumnParallel, column_bias
from flying_serving.weights.plain import part_of
from flying_serving.weights.quantized import ScaledKV
from flying_serving.weights.rule import Layer
from flying_serving.weights.storage import SharedLinear, StridedColumns
from flying_serving.weights.store import Store

ABSORBED = ("W_UK_T", "W_UV")
"""The parts of `kv_b_proj` for keys and for values, heads first. Decode steps multiply with them in
place of the projection.
"""


def _attention_of(layer: Layer) -> dict[str, MLAAttention]:
    """Return the attention layers that read a projection of latents, by name."""
    owners = layer.owners.items()
    return {name: owner for name, owner in owners if isinstance(owner, MLAAttention)}


class LatentProjection(ColumnParallel):
    """The projection whose weight latent attention reads as it was loaded.

    Packing it would be a second copy. vLLM does not pack it either.
    """

    @classmethod
    def matches(cls, layer: Layer) -> bool:
        return any(owner.kv_b_proj is layer.module for owner in _attention_of(layer).values())

    def stored(self, store: Store) -> SharedLinear:
        """See `Linear`. Raises as `refuse_latent`."""
        for name, attention in _attention_of(self.layer).items():
            refuse_latent(name, attention)
        return StridedColumns(self.full.weight.data, column_bias(self.full), self.segments)


class LatentAttention(ScaledKV):
    """The attention layer, with heads of the matrices that vLLM has taken from the projection."""

    of = MLAAttention

    @classmethod
    def end_loading(cls, layer: Layer) -> None:
        """Let vLLM take the matrices. Raises WeightError if a backend would pack them."""
        if layer.module.is_amx_bmm_enabled:
            raise _packs(layer.name, layer.module)
        layer.module.process_weights_after_loading(layer.module.kv_b_proj.params_dtype)

    def bind(self, layer: Layer, rank: int, degree: int) -> None:
        """Give a lane's layer its heads of lane 1's matrices. Raises WeightError if the heads do
        not divide.
        """
        for key in ABSORBED if degree > 1 else ():
            whole = getattr(self.full, key).detach()
            shape = whole[: layer.module.num_heads].shape
            part = part_of(f"{self.name}.{key}", whole, shape, rank, degree)
            layer.module.register_parameter(key, Parameter(part, requires_grad=False))
        super().bind(layer, rank, degree)


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
