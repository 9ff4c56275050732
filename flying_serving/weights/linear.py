"""Linear layers in lanes: products with parts of the one weight, and the finest cut of it."""

from collections.abc import Sequence
from operator import mul
from typing import Any, cast

import torch
from torch.nn import Module, Parameter
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

from flying_serving.errors import ConfigError, WeightError
from flying_serving.layout.shards import Segment, segments_of
from flying_serving.weights.gated import read_by_unit
from flying_serving.weights.methods import LinearPart
from flying_serving.weights.rule import Layer, Rule
from flying_serving.weights.storage import Matmul, OrderedColumns, SharedLinear, bias_part
from flying_serving.weights.store import Store, release


class Linear(Rule):
    """A linear layer whose `segments` are of its outputs, or of the inputs of a row-parallel
    one.
    """

    segments: tuple[Segment, ...]
    _storage: SharedLinear

    def stored(self, store: Store) -> SharedLinear:
        """Take the weight, and return its storage. Raises WeightError if that cannot be."""
        raise NotImplementedError

    def take(self, store: Store) -> None:
        self.segments = self.cut(self.layer, store.widest)
        self._storage = self.stored(store)
        self.made.append(self._storage)

    def bind(self, layer: Layer, rank: int, degree: int) -> None:
        """See `Rule`. A layer that vLLM does not cut is whole on every rank."""
        module, full = layer.module, self.full
        if module.tp_size == full.tp_size:
            rank, degree = 0, 1
        module.quant_method = LinearPart(self._part(layer, rank, degree))
        hold_tensors(module, full)
        if module.bias is not None:
            module.bias = self._bias(rank, degree)

    def _part(self, layer: Layer, rank: int, degree: int) -> Matmul:
        """Return the product of a rank. An activation reads it unit by unit, where the storage has
        it so and nothing else reads it.
        """
        units = len(self.segments[0].units_of(rank, degree))
        by_unit = units > 1 and isinstance(self._storage, OrderedColumns)
        if by_unit and read_by_unit(layer, units):
            return cast(OrderedColumns, self._storage).part_by_unit(rank, degree)
        return self._storage.part(rank, degree)

    def _bias(self, rank: int, degree: int) -> Parameter:
        """Return lane 1's bias, or a rank's part of one that the model itself adds to columns."""
        full = self.full
        is_outside = isinstance(full, ColumnParallelLinear) and full.skip_bias_add
        if degree == 1 or not is_outside:
            return full.bias
        part = bias_part(full.bias.data, self.segments, rank, degree)
        self.made.append(part)
        return Parameter(part, requires_grad=False)


class ColumnParallel(Linear):
    """A layer whose outputs are cut."""

    of = ColumnParallelLinear

    @classmethod
    def cut(cls, layer: Layer, engines: int) -> tuple[Segment, ...]:
        name, module, engines = layer.name, layer.module, _ranks(layer.module, engines)
        if isinstance(module, QKVParallelLinear):
            heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
            widths = (module.head_size, module.head_size, module.v_head_size)
            return by_heads(name, list(map(mul, heads, widths)), engines, heads)
        sizes = [module.output_size_per_partition]
        if isinstance(module, MergedColumnParallelLinear):
            sizes = [size // module.tp_size for size in module.output_sizes]
        return tuple(cut(name, size, "columns", engines) for size in sizes)

    def stored(self, store: Store) -> SharedLinear:
        weight = self.full.weight
        storage = store.columns(self.name, weight, column_bias(self.full), self.segments)
        # rows in another order are for the products alone
        if store.has_order(weight):
            release(self.full, "weight")
        return storage


class RowParallel(Linear):
    """A layer whose inputs are cut."""

    of = RowParallelLinear

    @classmethod
    def cut(cls, layer: Layer, engines: int) -> tuple[Segment, ...]:
        size, ranks = layer.module.input_size_per_partition, _ranks(layer.module, engines)
        return (cut(layer.name, size, "rows", ranks),)

    def stored(self, store: Store) -> SharedLinear:
        storage = store.rows(self.name, self.full.weight, row_bias(self.full), *self.segments)
        if store.packs:
            release(self.full, "weight")
        return storage


def cut(name: str, size: int, what: str, engines: int) -> Segment:
    """Cut `size` rows or columns (`what`) of a layer for groups of up to `engines`.

    Raises:
        WeightError: if they do not divide.
    """
    if size % engines:
        raise WeightError(f"{name}: {size} {what} do not divide by {engines}")
    return Segment(size, engines)


def by_heads(
    name: str, sizes: Sequence[int], engines: int, heads: Sequence[int]
) -> tuple[Segment, ...]:
    """Cut fused parts between heads: see `segments_of`. Raises WeightError if they do not
    divide.
    """
    try:
        return segments_of(sizes, engines, heads)
    except ConfigError as error:
        raise WeightError(f"{name}: {error}") from None


def column_bias(layer: Any) -> torch.Tensor | None:
    """Return the bias that is part of a layer's product; None: there is none, or the model adds
    it.
    """
    bias = None if layer.skip_bias_add else getattr(layer, "bias", None)
    return None if bias is None else cast(torch.Tensor, bias.data)


def row_bias(layer: RowParallelLinear) -> torch.Tensor | None:
    """Return the bias that this device's product has."""
    return None if layer.tp_rank > 0 else column_bias(layer)


def _ranks(layer: LinearBase, engines: int) -> int:
    """Return over how many ranks a layer is cut: some layers that vLLM calls parallel are whole on
    each rank.
    """
    return 1 if layer.disable_tp else engines


def hold_tensors(layer: Any, full: Any) -> None:
    """Let a layer of a lane hold the tensors of lane 1's, other than the bias."""
    if layer is full:
        return
    own, held = tensors_of(layer), tensors_of(full)
    for key in own.keys() - held.keys():
        delattr(layer, key)
    for key, tensor in held.items():
        layer.register_parameter(key, tensor)


def tensors_of(layer: Module) -> dict[str, Parameter]:
    """Return the parameters of a layer itself, by name, without the bias."""
    parameters = layer.named_parameters(recurse=False, remove_duplicate=False)
    return {key: parameter for key, parameter in parameters if key != "bias"}
