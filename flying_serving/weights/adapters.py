"""Bind the adapters of a lane's layers: views of the stacked tensors of lane 1's."""

from typing import Any

import torch
from vllm.lora.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinearWithLoRA,
    LogitsProcessorWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)

from flying_serving.errors import Unsupported
from flying_serving.weights.plain import Whole, part_of
from flying_serving.weights.rule import Layer

_BY_SLICE = (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
)
"""Wrappers with a stacked A and B for each fused layer, of which a rank has a part.

Shape of A: (slots, 1, rank of an adapter, inputs); of B: (slots, 1, outputs, rank of an adapter).
"""
_WHOLE = (VocabParallelEmbeddingWithLoRA, LogitsProcessorWithLoRA)
"""Wrappers whose stacked tensors are whole on every rank."""
_STACKED = ("lora_a_stacked", "lora_b_stacked")


class Adapter(Whole):
    """vLLM's wrapper of a layer. A lane's reads its part of the adapters of lane 1."""

    of = BaseLayerWithLoRA

    def bind(self, layer: Layer, rank: int, degree: int) -> None:
        """See `Whole`. Raises Unsupported, naming a layer whose adapters are no views of lane
        1's.
        """
        super().bind(layer, rank, degree)
        if degree > 1:
            _bind(self.name, layer.module, self.full, rank, degree)


def _bind(name: str, layer: Any, full: Any, rank: int, degree: int) -> None:
    if type(layer) in _WHOLE:
        for key in (*_STACKED, "lora_a_stacked_2d"):
            if hasattr(full, key):
                setattr(layer, key, getattr(full, key))
        if isinstance(layer, LogitsProcessorWithLoRA):
            _refuse_other_order(name, layer)
            layer.sharded_to_full_mapping_gpu = None
        return
    is_fused = type(layer) is ColumnParallelLinearWithLoRA and layer.is_merged_col_linear
    if type(layer) not in _BY_SLICE or (is_fused and layer.tp_size > full.tp_size):
        raise Unsupported(
            f"--enable-lora: adapters of {name} ({type(layer).__name__}) cannot be served by "
            "Flying Serving yet; --lora-target-modules can leave it out; --group-sizes 1 serves it"
        )
    for key in _STACKED:
        setattr(layer, key, _parts(f"{name}.{key}", layer, full, key, rank, degree))


def _parts(
    name: str, layer: Any, full: Any, key: str, rank: int, degree: int
) -> tuple[torch.Tensor, ...]:
    pairs = zip(getattr(layer, key), getattr(full, key), strict=True)
    return tuple(part_of(name, whole, part.shape, rank, degree) for part, whole in pairs)


def _refuse_other_order(name: str, layer: Any) -> None:
    """Raise Unsupported if ranks' logits, one after the other, are not in the order of tokens."""
    order = layer.sharded_to_full_mapping
    if order is not None and order != list(range(len(order))):
        raise Unsupported(
            f"--enable-lora: {name}: a vocabulary with padding between the parts of ranks cannot "
            "be served by Flying Serving yet; --group-sizes 1 serves it"
        )
