"""The storage of lane 1's matrices: packed unit by unit, or whole."""

import torch
from torch.nn import Module, Parameter
from vllm.model_executor.layers.linear import RowParallelLinear

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.weights.cuts import row_bias
from flying_serving.weights.lending.droppable import DroppableUnits
from flying_serving.weights.lending.weight_file import WeightFile
from flying_serving.weights.storage import (
    PackedColumns,
    PackedRows,
    SharedLinear,
    StridedColumns,
    StridedRows,
)
from flying_serving.weights.unit_order import keep_by_unit
from flying_serving.weights.units import Pack


class SharedMatrices:
    """The storage of all matrices of a worker that are not quantized.

    `pack`: how to pack a matrix on the CPU; None: keep matrices whole. `file`: where packed weights
    are kept so that they may be dropped. `droppable`: the units that may be dropped.
    """

    def __init__(
        self, pack: Pack | None, file: WeightFile | None, droppable: DroppableUnits
    ) -> None:
        self.packs = pack is not None
        self._pack = pack
        self._file = file
        self._droppable = droppable
        self._by_unit: dict[int, tuple[Segment, ...]] = {}
        """The cuts of fused weights whose rows are unit by unit, by address."""

    def columns(
        self,
        name: str,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        segments: tuple[Segment, ...],
    ) -> SharedLinear:
        """Take the weight (outputs, inputs) of a layer whose outputs are cut, or of an LM head.

        Raises WeightError if another layer has the same weight and is cut differently.
        """
        if self._pack is None:
            self._keep_by_unit(name, weight, segments)
            units = self._droppable.of_columns(name, weight, segments)
            return StridedColumns(weight, bias, segments, units)
        packed = PackedColumns(weight, bias, segments, self._pack, self._file)
        self._droppable.add(name, packed.units)
        return packed

    def rows(self, name: str, layer: RowParallelLinear, segment: Segment) -> SharedLinear:
        """Take the weight of a layer whose inputs are cut."""
        weight, bias = layer.weight.data, row_bias(layer)
        if self._pack is None:
            units = self._droppable.of_rows(name, weight, segment)
            return StridedRows(weight, bias, segment, units)
        packed = PackedRows(weight, bias, segment, self._pack, self._file)
        self._droppable.add(name, packed.units)
        return packed

    def has_order(self, weight: torch.Tensor) -> bool:
        """Return whether the storage has a weight in another format or order than its layer."""
        return self.packs or weight.data_ptr() in self._by_unit

    def _keep_by_unit(self, name: str, weight: torch.Tensor, segments: tuple[Segment, ...]) -> None:
        """Reorder the rows of a fused weight in place, once if layers share it. Raises WeightError
        if they cut it differently.
        """
        order = self._by_unit.get(weight.data_ptr())
        if order is None:
            if keep_by_unit(weight, segments):
                self._by_unit[weight.data_ptr()] = segments
        elif order != segments:
            raise WeightError(f"{name}: another layer has the same weight and is cut differently")


def release(layer: Module, name: str) -> None:
    """Take a weight from its layer: the storage has it, in another format or order."""
    weight = getattr(layer, name)
    setattr(layer, name, Parameter(weight.data.new_empty(0), requires_grad=False))
