"""Quantized linear layers that lanes share: products with parts of what vLLM's kernel has made.

vLLM loads and processes the layer for lane 1. Many kernels keep a weight such that a part of it is
a view. Then a lane's product is one call of vLLM's own method over views. So a lane rounds its
input and adds as a rank of stock vLLM does at that degree. `formats.py` says for which kernels this
holds, and which way the others have.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Module, Parameter
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.vllm_adapter.weights.fp8 import with_outputs
from flying_serving.vllm_adapter.weights.int8 import Int8Inputs, Int8Unit
from flying_serving.weights.cuts import column_bias, linear_segments, row_bias
from flying_serving.weights.formats import (
    ALL,
    Way,
    check_quantized,
    format_of,
    has_several,
    is_opaque,
    kernel_of,
    part_of,
    with_kernel,
)
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
from flying_serving.weights.unit_order import keep_by_unit


class SharedQuantized:
    """The quantized layers of lane 1's model. `lends`: whether weights may be dropped.

    `input_rounding`: the largest of a layer's `Format`.
    """

    def __init__(self, widest: int, *, lends: bool) -> None:
        self._widest, self._lends = widest, lends
        self.input_rounding = 0.0

    def take(
        self, name: str, layer: Any, segments: dict[str, tuple[Segment, ...]]
    ) -> dict[str, SharedLinear]:
        """Return the storage of a layer, by its name, and note the segments of its outputs. Without
        groups, a layer that vLLM has processed stays as it is.

        Raises:
            WeightError: naming the layer, if it cannot be cut.
        """
        if self._lends:
            raise WeightError(f"{name}: quantized weights cannot be lent (--lend-weights)")
        if self._widest == 1 and not is_opaque(layer):
            return {}
        of_layer = linear_segments(name, layer, self._widest)
        check_quantized(name, layer, of_layer)
        weight = QuantizedLayer(name, layer)
        self.input_rounding = max(self.input_rounding, weight.format.input_rounding)
        if isinstance(layer, RowParallelLinear):
            return {name: _row_parallel(weight, of_layer[0])}
        segments[name] = of_layer
        return {name: _column_parallel(weight, of_layer)}


def _column_parallel(weight: "QuantizedLayer", segments: Sequence[Segment]) -> SharedLinear:
    """Return the storage of a layer whose outputs are cut, or none of it."""
    bias = column_bias(weight.layer)
    if not weight.has_data:
        return _NoProducts()
    if weight.format.way is Way.OPAQUE:
        return _opaque_columns(weight.layer, segments, bias)
    return QuantizedColumns(weight, segments, bias)


def _row_parallel(weight: "QuantizedLayer", segment: Segment) -> SharedLinear:
    """Return the storage of a layer whose inputs are cut."""
    bias = row_bias(weight.layer)
    if not weight.has_data:
        return _NoProducts()
    if weight.format.way is Way.OPAQUE:
        return _opaque_rows(weight.layer, segment, bias)
    if weight.format.way is Way.INPUTS_APART:
        return weight.rows_apart(segment, bias)
    return _Rows(weight, segment, bias)


def hold_tensors(layer: Any, full: Any) -> None:
    """Let a layer of a lane hold the tensors of lane 1's, other than the bias."""
    if layer is full:
        return
    own, held = tensors_of(layer), tensors_of(full)
    for key in own.keys() - held.keys():
        delattr(layer, key)
    for key, tensor in held.items():
        layer.register_parameter(key, tensor)


def hold_scales(layer: Module, full: Module | None) -> None:
    """Let an attention layer of a lane hold the scales of its KV that lane 1's has. vLLM loads them
    through parameters, which it has removed from lane 1's.
    """
    if not isinstance(getattr(layer, "quant_method", None), BaseKVCacheMethod) or full is None:
        return
    for key in tensors_of(layer).keys() - tensors_of(full).keys():
        delattr(layer, key)
    for key, scale in full.named_buffers(recurse=False):
        layer.register_buffer(key, scale)
    for key, value in vars(full).items():
        if key.endswith("_scale_float"):
            setattr(layer, key, value)


def tensors_of(layer: Module) -> dict[str, Parameter]:
    """Return the parameters of a layer itself, by name, without the bias."""
    parameters = layer.named_parameters(recurse=False, remove_duplicate=False)
    return {key: parameter for key, parameter in parameters if key != "bias"}


class QuantizedLayer:
    """The tensors of a layer of lane 1, as vLLM's kernel has them. Some are changed in place."""

    def __init__(self, name: str, layer: Any) -> None:
        self.layer, self._method, self._kernel = layer, layer.quant_method, kernel_of(layer)
        self.format = format_of(name, layer)
        self._tensors = {key: tensor.data for key, tensor in tensors_of(layer).items()}
        self.device = next(iter(self._tensors.values())).device
        inputs = getattr(layer, "input_size_per_partition", layer.input_size)
        outputs = getattr(layer, "output_size_per_partition", layer.output_size)
        self._sizes = (outputs, inputs)

    @property
    def has_data(self) -> bool:
        """False if the weight is one number, seen in its shape."""
        largest = max(self._tensors.values(), key=torch.Tensor.numel)
        return any(largest.stride())

    def keep_by_unit(self, segments: Sequence[Segment]) -> None:
        """Reorder the outputs of a fused layer in place: unit by unit of all segments."""
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
        return self._product(views, bias, with_outputs(self._kernel, width))

    def of_inputs(self, inputs: slice, bias: torch.Tensor | None) -> Matmul:
        """Return vLLM's product of (tokens, some inputs) to (tokens, out), with views. Scales of
        blocks, each for thousands of numbers, are copied: kernels read them in one piece.
        """
        tensors = {key: self._view(key, ALL, inputs) for key in self._tensors}
        tensors |= {key: t.contiguous() for key, t in tensors.items() if "scale" in key}
        other = self.format.of_inputs
        if other is None or range(self._sizes[1])[inputs] == range(self._sizes[1]):
            return self._product(tensors, bias, self._kernel)
        return self._product(tensors, bias, other(self._kernel))

    def rows_apart(self, segment: Segment, bias: torch.Tensor | None) -> "_RowsApart":
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
            units.append(self._product(pieces, None if unit else bias, self._kernel))
        for key in copied:
            _release(self.layer, key)
        return _RowsApart(units, segment)

    def _product(
        self, tensors: dict[str, torch.Tensor], bias: torch.Tensor | None, kernel: Any
    ) -> Matmul:
        method, part = self._method, copy.copy(self.layer)
        part.__dict__["_parameters"] = {
            key: Parameter(tensor, requires_grad=False) for key, tensor in tensors.items()
        } | {"bias": None}
        if kernel is not self._kernel:
            method = with_kernel(part, method, kernel)
        return lambda x: method.apply(part, x, bias)

    def _view(self, key: str, outputs: slice, inputs: slice) -> torch.Tensor:
        return part_of(self._tensors[key], self.format.tensors[key], self._sizes, outputs, inputs)


class QuantizedColumns:
    """Column-parallel, with outputs kept unit by unit: a rank's product is one with views."""

    def __init__(
        self, weight: QuantizedLayer, segments: Sequence[Segment], bias: torch.Tensor | None
    ) -> None:
        weight.keep_by_unit(segments)
        self._weight = weight
        self._bias = None if bias is None else bias_by_unit(bias, segments)
        self._columns = OrderedColumns(segments, self._product, weight.device)

    def part(self, rank: int, degree: int) -> Matmul:
        """See `SharedLinear`."""
        return self._columns.part(rank, degree)

    def part_by_unit(self, rank: int, degree: int) -> Matmul:
        """See `OrderedColumns.part_by_unit`."""
        return self._columns.part_by_unit(rank, degree)

    def _product(self, rows: slice) -> Matmul:
        return self._weight.of_outputs(rows, None if self._bias is None else self._bias[rows])


class _Rows:
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


class _RowsApart:
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

    def part_by_unit(self, rank: int, degree: int) -> Matmul:
        return _multiply_nothing


def _multiply_nothing(x: torch.Tensor) -> torch.Tensor:
    raise WeightError("a product with a layer without data")


def _opaque_columns(
    layer: Any, segments: Sequence[Segment], bias: torch.Tensor | None
) -> UnitColumns:
    """Return the products with units of outputs, each processed by itself; the weight is
    released.
    """
    families: list[tuple[list[Segment], list[Int8Unit]]] = []
    kernel, place = kernel_of(layer), 0
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
    _release(layer, "weight")
    return UnitColumns(families, Int8Inputs(first.kernel, first.layer))


def _scales(layer: Any, rows: Sequence[slice], weights: range) -> torch.Tensor:
    """Return the scales of some outputs, or of the fused weights that they are of."""
    scales = layer.weight_scale.data
    if scales.dim() == 1:  # one for each weight
        return scales[weights.start : weights.stop]
    return torch.cat([scales[part] for part in rows])


def _opaque_rows(layer: Any, segment: Segment, bias: torch.Tensor | None) -> UnitRows:
    """Return the products with units of inputs, each processed by itself; the weight is released.
    Products are added in float32: int8 numbers are summed exactly, so little is rounded before.
    """
    kernel, width, wide = kernel_of(layer), layer.output_size_per_partition, torch.float32
    units: list[Int8Unit] = []
    for unit, part in enumerate(layer.weight.data.split(segment.unit_size, dim=1)):
        tensors = {"weight": part.contiguous()}
        units.append(Int8Unit(kernel, layer, tensors, [width], None if unit else bias, wide))
    _release(layer, "weight")
    return UnitRows(units, segment, width, Int8Inputs(units[0].kernel, units[0].layer), wide)


def _release(layer: Module, key: str) -> None:
    released = getattr(layer, key).data.new_empty(0)
    layer.register_parameter(key, Parameter(released, requires_grad=False))
