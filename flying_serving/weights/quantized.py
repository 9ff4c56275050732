"""Quantized linear layers that lanes share: products with parts of what vLLM's kernel has made.

vLLM loads and processes the layer for lane 1. Many kernels keep a weight such that a part of it is
a view. Then a lane's product is one call of vLLM's own method over views. So a lane rounds its
input and adds as a rank of stock vLLM does at that degree. `formats.py` says for which kernels this
holds, and which form parts of the others have.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.vllm_adapter.weights.fp8 import with_outputs
from flying_serving.vllm_adapter.weights.int8 import Int8Inputs, Int8Unit
from flying_serving.weights.formats import (
    ALL,
    PartForm,
    check_quantized,
    format_of,
    has_several,
    is_opaque,
    is_quantized,
    kernel_of,
    part_of,
    with_kernel,
)
from flying_serving.weights.linear import (
    ColumnParallel,
    Linear,
    RowParallel,
    column_bias,
    row_bias,
    tensors_of,
)
from flying_serving.weights.plain import Whole
from flying_serving.weights.rule import Layer
from flying_serving.weights.storage import (
    Matmul,
    OrderedColumns,
    SharedLinear,
    UnitColumns,
    UnitRows,
    bias_by_unit,
    rows_of,
    sum_of_units,
    unit_families,
)
from flying_serving.weights.store import Store, release
from flying_serving.weights.unit_order import keep_by_unit


class Quantized(Linear):
    """A quantized layer, of which vLLM may cut outputs, inputs or nothing."""

    @classmethod
    def matches(cls, layer: Layer) -> bool:
        return is_quantized(layer.module)

    @classmethod
    def cut(cls, layer: Layer, engines: int) -> tuple[Segment, ...]:
        """See `Rule`. Raises WeightError as `check_quantized`, too."""
        segments: tuple[Segment, ...] = (Segment(layer.module.output_size, 1),)
        for kind in (ColumnParallel, RowParallel):
            if kind.matches(layer):
                segments = kind.cut(layer, engines)
        check_quantized(layer.name, layer.module, segments)
        return segments

    def take(self, store: Store) -> None:
        """See `Rule`. Without groups, a layer that vLLM has processed stays as it is."""
        if store.lends:
            raise WeightError(f"{self.name}: quantized weights cannot be lent (--lend-weights)")
        if store.widest > 1 or is_opaque(self.full):
            super().take(store)

    def stored(self, store: Store) -> SharedLinear:
        full, segments, weight = self.full, self.segments, QuantizedLayer(self.name, self.full)
        self.input_rounding, form = weight.format.input_rounding, weight.format.part_form
        if not weight.has_data:
            return _NoProducts()
        if not isinstance(full, RowParallelLinear):
            columns = _opaque_columns if form is PartForm.OPAQUE else QuantizedLayer.columns
            return columns(weight, segments, column_bias(full))
        rows: dict[PartForm, Callable[..., SharedLinear]] = {
            PartForm.VIEWS: _RowViews,
            PartForm.INPUTS_APART: QuantizedLayer.inputs_apart,
            PartForm.OPAQUE: _opaque_rows,
        }
        return rows[form](weight, *segments, row_bias(full))

    def bind(self, layer: Layer, rank: int, degree: int) -> None:
        if self.made:
            super().bind(layer, rank, degree)


class ScaledKV(Whole):
    """An attention layer whose KV may have scales of the checkpoint. vLLM loads them through
    parameters, which it has removed from lane 1's.
    """

    of = Attention

    def bind(self, layer: Layer, rank: int, degree: int) -> None:
        """See `Whole`. A lane's layer holds the scales that lane 1's has."""
        module = layer.module
        if degree > 1 and isinstance(getattr(module, "quant_method", None), BaseKVCacheMethod):
            for key in tensors_of(module).keys() - tensors_of(self.full).keys():
                delattr(module, key)
            for key, scale in self.full.named_buffers(recurse=False):
                module.register_buffer(key, scale)
            for key, value in vars(self.full).items():
                if key.endswith("_scale_float"):
                    setattr(module, key, value)
        super().bind(layer, rank, degree)


class QuantizedLayer:
    """The tensors of a layer of lane 1, as vLLM's kernel has them. Some are changed in place."""

    def __init__(self, name: str, layer: Any) -> None:
        self.layer, self._method, self.kernel = layer, layer.quant_method, kernel_of(layer)
        self.format = format_of(name, layer)
        self._tensors = {key: tensor.data for key, tensor in tensors_of(layer).items()}
        self._device = next(iter(self._tensors.values())).device
        inputs = getattr(layer, "input_size_per_partition", layer.input_size)
        outputs = getattr(layer, "output_size_per_partition", layer.output_size)
        self._sizes = (outputs, inputs)

    @property
    def has_data(self) -> bool:
        """False if the weight is one number, seen in its shape."""
        largest = max(self._tensors.values(), key=torch.Tensor.numel)
        return any(largest.stride())

    def columns(self, segments: Sequence[Segment], bias: torch.Tensor | None) -> OrderedColumns:
        """Reorder the outputs of a fused layer in place: unit by unit of all segments. Return the
        products with views of them.
        """
        self._keep_by_unit(segments)
        added = None if bias is None else bias_by_unit(bias, segments)
        return OrderedColumns(
            segments,
            lambda rows: self.of_outputs(rows, None if added is None else added[rows]),
            self._device,
        )

    def _keep_by_unit(self, segments: Sequence[Segment]) -> None:
        outputs, _ = self._sizes
        for key, tensor in self._tensors.items():
            dim = self.format.tensors[key].outputs
            if dim is not None and has_several(tensor, dim):
                rows = tensor.movedim(dim, 0)
                scaled = [Segment(s.size * rows.shape[0] // outputs, s.units) for s in segments]
                keep_by_unit(rows, scaled)

    def of_outputs(self, outputs: slice, bias: torch.Tensor | None) -> Matmul:
        """Return vLLM's product of (tokens, in) to (tokens, some outputs), with views."""
        views = {key: self._view(key, outputs, ALL) for key in self._tensors}
        width = len(range(self._sizes[0])[outputs])
        return self._product(views, bias, with_outputs(self.kernel, width))

    def of_inputs(self, inputs: slice, bias: torch.Tensor | None) -> Matmul:
        """Return vLLM's product of (tokens, some inputs) to (tokens, out), with views. Scales of
        blocks, each for thousands of numbers, are copied: kernels read them in one piece.
        """
        tensors = {key: self._view(key, ALL, inputs) for key in self._tensors}
        tensors |= {key: t.contiguous() for key, t in tensors.items() if "scale" in key}
        other = self.format.of_inputs
        if other is None or range(self._sizes[1])[inputs] == range(self._sizes[1]):
            return self._product(tensors, bias, self.kernel)
        return self._product(tensors, bias, other(self.kernel))

    def inputs_apart(self, segment: Segment, bias: torch.Tensor | None) -> "_InputsApart":
        """Return the products with units of inputs, each in one piece. The layer's tensors that
        are copied for it are released.
        """
        units: list[Matmul] = []
        copied: set[str] = set()
        for unit in range(segment.units):
            (inputs,) = rows_of([segment], unit, segment.units)
            views = {key: self._view(key, ALL, inputs) for key in self._tensors}
            copied |= {key for key, view in views.items() if not view.is_contiguous()}
            pieces = {key: view.contiguous() for key, view in views.items()}
            units.append(self._product(pieces, None if unit else bias, self.kernel))
        for key in copied:
            release(self.layer, key)
        return _InputsApart(units, segment)

    def _product(
        self, tensors: dict[str, torch.Tensor], bias: torch.Tensor | None, kernel: Any
    ) -> Matmul:
        method, part = self._method, copy.copy(self.layer)
        part.__dict__["_parameters"] = {
            key: Parameter(tensor, requires_grad=False) for key, tensor in tensors.items()
        } | {"bias": None}
        if kernel is not self.kernel:
            method = with_kernel(part, method, kernel)
        return lambda x: method.apply(part, x, bias)

    def _view(self, key: str, outputs: slice, inputs: slice) -> torch.Tensor:
        return part_of(self._tensors[key], self.format.tensors[key], self._sizes, outputs, inputs)


class _RowViews:
    """Row-parallel: a rank multiplies with its inputs, in one product with views."""

    def __init__(self, weight: QuantizedLayer, segment: Segment, bias: torch.Tensor | None) -> None:
        self._weight, self._segment, self._bias = weight, segment, bias
        self._parts: dict[tuple[int, int], Matmul] = {}

    def part(self, rank: int, degree: int) -> Matmul:
        """See `SharedLinear`. The product is kept, as it may have scales of its own."""
        if (rank, degree) not in self._parts:
            (inputs,) = rows_of([self._segment], rank, degree)
            bias = None if rank else self._bias
            self._parts[rank, degree] = self._weight.of_inputs(inputs, bias)
        return self._parts[rank, degree]


class _InputsApart:
    """Row-parallel, with a product for each unit of inputs: a rank adds those of its units."""

    def __init__(self, units: Sequence[Matmul], segment: Segment) -> None:
        self._units, self._segment = units, segment

    def part(self, rank: int, degree: int) -> Matmul:
        """See `SharedLinear`."""
        products = [self._units[unit] for unit in self._segment.units_of(rank, degree)]
        if len(products) == 1:
            return products[0]

        def rows(x: torch.Tensor) -> torch.Tensor:
            parts = zip(products, x.chunk(len(products), -1), strict=True)
            return sum_of_units([product(part) for product, part in parts])

        return rows


class _NoProducts:
    """A layer of a model without data, whose cuts alone are checked."""

    def part(self, rank: int, degree: int) -> Matmul:
        return _multiply_nothing


def _multiply_nothing(x: torch.Tensor) -> torch.Tensor:
    raise WeightError("a product with a layer without data")


def _opaque_columns(
    weight: QuantizedLayer, segments: Sequence[Segment], bias: torch.Tensor | None
) -> UnitColumns:
    """Return the products with units of outputs, each processed by itself; the weight is
    released.
    """
    families: list[tuple[list[Segment], list[Int8Unit]]] = []
    layer, kernel, place = weight.layer, weight.kernel, 0
    for family, rows_by_unit in unit_families(segments):
        weights = range(place, place + len(family))
        place = weights.stop
        widths = [segment.unit_size for segment in family]
        units = []
        for rows in rows_by_unit:
            tensors = {"weight": torch.cat([layer.weight.data[part] for part in rows])}
            tensors["weight_scale"] = _scales(layer, rows, weights)
            unit_bias = None if bias is None else torch.cat([bias[part] for part in rows])
            units.append(Int8Unit(kernel, layer, tensors, widths, unit_bias, layer.params_dtype))
        families.append((family, units))
    first = families[0][1][0]
    release(layer, "weight")
    return UnitColumns(families, Int8Inputs(first.kernel, first.layer))


def _scales(layer: Any, rows: Sequence[slice], weights: range) -> torch.Tensor:
    """Return the scales of some outputs, or of the fused weights that they are of."""
    scales = layer.weight_scale.data
    if scales.dim() == 1:  # one for each weight
        return scales[weights.start : weights.stop]
    return torch.cat([scales[part] for part in rows])


def _opaque_rows(weight: QuantizedLayer, segment: Segment, bias: torch.Tensor | None) -> UnitRows:
    """Return the products with units of inputs, each processed by itself; the weight is released.
    Products are added in float32: int8 numbers are summed exactly, so little is rounded before.
    """
    layer, wide = weight.layer, torch.float32
    kernel, width = weight.kernel, layer.output_size_per_partition
    units: list[Int8Unit] = []
    for unit, part in enumerate(layer.weight.data.split(segment.unit_size, dim=1)):
        tensors = {"weight": part.contiguous()}
        units.append(Int8Unit(kernel, layer, tensors, [width], None if unit else bias, wide))
    release(layer, "weight")
    return UnitRows(units, segment, width, Int8Inputs(units[0].kernel, units[0].layer), wide)
