"""The storage of lane 1's matrices: packed unit by unit, or whole."""

from typing import Any

import torch
from torch.nn import Module, Parameter

from flying_serving.errors import WeightError
from flying_serving.layout.shards import Segment
from flying_serving.weights.lending.arena_placement import ArenaPlacement
from flying_serving.weights.lending.droppable import DroppableUnits
from flying_serving.weights.storage import (
    PackedColumns,
    PackedRows,
    SharedLinear,
    StridedColumns,
    StridedRows,
)
from flying_serving.weights.unit_order import keep_by_unit
from flying_serving.weights.units import Pack, RawUnits, WeightPages

Segments = tuple[Segment, ...]


class Store:
    """The storage that the layers of a worker are taken into.

    `widest`: engines in the widest group. `pack`: how to pack a matrix on the CPU; None: keep
    matrices whole. `pages`, `placement`: as of `DroppableUnits`. `lends`: whether weights may be
    dropped.
    """

    def __init__(
        self,
        widest: int,
        pack: Pack | None,
        pages: WeightPages | None = None,
        placement: ArenaPlacement | None = None,
    ) -> None:
        self.widest, self.packs = widest, pack is not None
        self.droppable = DroppableUnits(pages, placement)
        self.lends = self.droppable.pages is not None
        self._pack, self._pages = pack, pages
        self._by_unit: dict[int, Segments] = {}
        """The cuts of fused weights whose rows are unit by unit, by address."""
        self._logits: dict[int, SharedLinear] = {}
        self._tables: dict[int, RawUnits] = {}

    def columns(
        self, name: str, weight: Parameter, bias: torch.Tensor | None, segments: Segments
    ) -> SharedLinear:
        """Take the weight (outputs, inputs) of a layer whose outputs are cut, or of an LM head.

        Raises WeightError if another layer has the same weight and is cut differently.
        """
        if self._pack is None:
            self.droppable.place(weight, segments)
            self._keep_by_unit(name, weight.data, segments)
            units = self.droppable.of_placed(name, weight.data, segments)
            return StridedColumns(weight.data, bias, segments, units)
        packed = PackedColumns(weight.data, bias, segments, self._pack, self._pages)
        self.droppable.add(name, packed.units)
        return packed

    def rows(
        self, name: str, weight: Parameter, bias: torch.Tensor | None, segment: Segment
    ) -> SharedLinear:
        """Take the weight (outputs, inputs) of a layer whose inputs are cut."""
        if self._pack is None:
            self.droppable.place(weight, (segment,), by_columns=True)
            units = self.droppable.of_placed(name, weight.data.t(), (segment,))
            return StridedRows(weight.data, bias, segment, units)
        packed = PackedRows(weight.data, bias, segment, self._pack, self._pages)
        self.droppable.add(name, packed.units)
        return packed

    def logits(self, name: str, weight: Parameter, segments: Segments) -> SharedLinear:
        """Take the weight of an LM head, once where modules are tied."""
        self.droppable.place(weight, segments)
        if weight.data_ptr() not in self._logits:
            self._logits[weight.data_ptr()] = self.columns(name, weight, None, segments)
        return self._logits[weight.data_ptr()]

    def table(self, name: str, weight: Parameter, segments: Segments) -> RawUnits:
        """Take the weight of an embedding, once where modules are tied. If it is an LM head's too,
        that one's logits come first.
        """
        self.droppable.place(weight, segments)
        where = weight.data_ptr()
        if where not in self._tables:
            logits = self._logits.get(where)
            self._tables[where] = self.droppable.of_table(name, weight.data, segments, logits)
        return self._tables[where]

    def has_order(self, weight: torch.Tensor) -> bool:
        """Return whether the storage has a weight in another format or order than its layer."""
        return self.packs or weight.data_ptr() in self._by_unit

    def _keep_by_unit(self, name: str, weight: torch.Tensor, segments: Segments) -> None:
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
    """Take a tensor from its layer: the storage has it, in another format or order."""
    weight: Any = getattr(layer, name)
    layer.register_parameter(name, Parameter(weight.data.new_empty(0), requires_grad=False))
