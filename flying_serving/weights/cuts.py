"""The finest cut of each layer of a model: the segments of each weight, or why there are none."""

from collections.abc import Collection
from typing import Any, cast

import torch
from torch.nn import Module
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from flying_serving.errors import ConfigError, WeightError
from flying_serving.layout.shards import Segment, segments_of
from flying_serving.weights.expert_forms import form_of
from flying_serving.weights.formats import check_quantized, is_quantized


def cut(name: str, size: int, what: str, engines: int) -> Segment:
    """Cut `size` rows or columns (`what`) of a layer for groups of up to `engines`.

    Raises:
        WeightError: if they do not divide.
    """
    if size % engines:
        raise WeightError(f"{name}: {size} {what} do not divide by {engines}")
    return Segment(size, engines)


def column_segments(name: str, layer: ColumnParallelLinear, engines: int) -> tuple[Segment, ...]:
    """Return the segments of a column-parallel layer of lane 1, for groups of up to `engines`.

    Raises:
        WeightError: naming the layer, if one of them does not divide.
    """
    engines = _ranks(layer, engines)
    if isinstance(layer, QKVParallelLinear):
        kv = layer.num_kv_heads
        heads = (layer.num_heads, kv, kv)
        sizes = (layer.num_heads * layer.head_size, kv * layer.head_size, kv * layer.v_head_size)
        try:
            return segments_of(sizes, engines, heads)
        except ConfigError as error:
            raise WeightError(f"{name}: {error}") from None
    if isinstance(layer, MergedColumnParallelLinear):
        return tuple(
            cut(name, size // layer.tp_size, "columns", engines) for size in layer.output_sizes
        )
    return (cut(name, layer.output_size_per_partition, "columns", engines),)


def linear_segments(name: str, layer: LinearBase, engines: int) -> tuple[Segment, ...]:
    """Return the segments of a linear layer: the inputs of a row-parallel one, the outputs of any
    other. Raises WeightError as `column_segments` and `row_segment`.
    """
    if isinstance(layer, ColumnParallelLinear):
        return column_segments(name, layer, engines)
    if isinstance(layer, RowParallelLinear):
        return (row_segment(name, layer, engines),)
    return (Segment(layer.output_size, 1),)


def row_segment(name: str, layer: RowParallelLinear, engines: int) -> Segment:
    """Return the one segment of a row-parallel layer of lane 1. Raises WeightError if it does not
    divide.
    """
    return cut(name, layer.input_size_per_partition, "rows", _ranks(layer, engines))


def refuse_quantized(name: str, layer: Module) -> None:
    """Raise WeightError if a layer that is not cut evenly is quantized."""
    if is_quantized(layer):
        raise WeightError(f"{name}: a quantized layer with groups of heads cannot be cut yet")


def vocabulary_segment(name: str, layer: VocabParallelEmbedding, engines: int) -> Segment:
    """Return the one segment of an embedding or an LM head of lane 1. Raises WeightError if it is
    quantized, or does not divide.
    """
    weight = getattr(layer, "weight", None)
    if weight is None or weight.element_size() == 1:
        raise WeightError(f"{name}: quantized embeddings and LM heads cannot be shared by lanes")
    return cut(name, weight.shape[0], "tokens of the vocabulary", engines)


def column_bias(layer: Any) -> torch.Tensor | None:
    """Return the bias that is part of a layer's product; None: there is none, or the model adds
    it.
    """
    bias = None if layer.skip_bias_add else getattr(layer, "bias", None)
    return None if bias is None else cast(torch.Tensor, bias.data)


def row_bias(layer: RowParallelLinear) -> torch.Tensor | None:
    """Return the bias that this device's product has."""
    outside = layer.skip_bias_add or layer.tp_rank > 0 or layer.bias is None
    return None if outside else cast(torch.Tensor, layer.bias.data)


def check_cuts(lane1: Module, engines: int, uneven: Collection[str] = ()) -> None:
    """Raise WeightError for the first layer of lane 1's model that cannot be cut for groups of
    `engines`. `uneven`: names of layers of `recurrent_segments`.
    """
    for name, layer in lane1.named_modules():
        if name in uneven:
            refuse_quantized(name, layer)
        elif isinstance(layer, LinearBase):
            segments = linear_segments(name, layer, engines)
            if is_quantized(layer):
                check_quantized(name, layer, segments)
        elif isinstance(layer, VocabParallelEmbedding):
            vocabulary_segment(name, layer, engines)
        elif isinstance(layer, RoutedExperts):
            form_of(name, layer).columns(name, layer, engines)


def _ranks(layer: LinearBase, engines: int) -> int:
    """Return over how many ranks a layer is cut: some layers that vLLM calls parallel are whole on
    each rank.
    """
    return 1 if layer.disable_tp else engines
