"""The units of a model that a group may drop.

They are of packed weights, of weights in an arena, and of tables and experts.
"""

from collections.abc import Sequence

import torch
from torch.nn import Module

from flying_serving.layout.shards import Segment
from flying_serving.weights.lending.arena_placement import Placement
from flying_serving.weights.lending.host_pages import HostPages
from flying_serving.weights.lending.weight_file import WeightFile
from flying_serving.weights.storage import SharedLinear, StridedColumns
from flying_serving.weights.unit_order import UnitOrder
from flying_serving.weights.units import RawUnits, Units, WeightPages


class DroppableUnits:
    """The units that may be dropped, `by_layer`: by the name of their layer.

    `pages`: the memory of weights that are read as they are: that of the host, kept in `file`, or
    that of `placement`. Without both no unit may be dropped.
    """

    def __init__(self, file: WeightFile | None, placement: Placement | None) -> None:
        self.by_layer: dict[str, list[Units]] = {}
        self.pages: WeightPages | None = None if file is None else HostPages(file)
        self._placement = placement
        if placement is not None:
            self.pages = placement.pages

    def place(self, model: Module) -> None:
        """Move the weights of lane 1's model into the arena, if there is one."""
        if self._placement is not None:
            self._placement.place(model)

    def place_units(self, units: Sequence[Module]) -> None:
        """Move the weights of routed experts into the arena, if there is one."""
        if self._placement is not None:
            self._placement.place_units(units)

    def add(self, name: str, units: Units) -> None:
        """Let units of a layer be dropped, if any may."""
        if self.pages is not None:
            self.by_layer.setdefault(name, []).append(units)

    def of_columns(
        self, name: str, weight: torch.Tensor, segments: tuple[Segment, ...]
    ) -> RawUnits | None:
        """Add the units of a column-parallel weight (out, in), which is kept unit by unit.

        None: the weight is not in the arena.
        """
        return self._of_placed(name, weight, segments)

    def of_rows(self, name: str, weight: torch.Tensor, segment: Segment) -> RawUnits | None:
        """Add the units of a row-parallel weight (out, in). None: it is not in the arena."""
        return self._of_placed(name, weight.t(), (segment,))

    def _of_placed(
        self, name: str, weight: torch.Tensor, segments: tuple[Segment, ...]
    ) -> RawUnits | None:
        if self._placement is None or not self._placement.pages.holds(weight):
            return None
        rows = UnitOrder(segments).rows_of_units()
        units = RawUnits.of_rows(weight, segments, self.pages, rows)
        self.add(name, units)
        return units

    def of_table(
        self,
        name: str,
        weight: torch.Tensor,
        segments: tuple[Segment, ...],
        product: SharedLinear | None,
    ) -> RawUnits:
        """Return the units of a weight that is looked up in.

        `product`: with the same weight. If it reads the same memory, its units are the table's.
        """
        if isinstance(product, StridedColumns) and product.units is not None:
            return product.units
        units = RawUnits.of_rows(weight, segments, self.pages)
        self.add(name, units)
        return units
