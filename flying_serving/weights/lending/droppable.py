"""The units of a model that a group may drop.

They are of packed weights, of weights in an arena, and of tables and experts.
"""

from collections.abc import Sequence

import torch
from torch.nn import Module, Parameter

from flying_serving.layout.shards import Segment
from flying_serving.weights.lending.arena_placement import ArenaPlacement
from flying_serving.weights.storage import SharedLinear, StridedColumns
from flying_serving.weights.unit_order import UnitOrder
from flying_serving.weights.units import RawUnits, Units, WeightPages


class DroppableUnits:
    """The units that may be dropped, `by_layer`: by the name of their layer.

    `pages`: the memory of weights that are read as they are, that of `placement` if there is one.
    Without both no unit may be dropped.
    """

    def __init__(self, pages: WeightPages | None, placement: ArenaPlacement | None) -> None:
        self.by_layer: dict[str, list[Units]] = {}
        self.pages = pages if placement is None else placement.pages
        self._placement = placement

    def place(
        self, weight: Parameter, segments: Sequence[Segment], *, by_columns: bool = False
    ) -> None:
        """Move a weight into the arena, if there is one: see `ArenaPlacement.place`."""
        if self._placement is not None:
            self._placement.place(weight, segments, by_columns=by_columns)

    def place_units(self, units: Sequence[Module]) -> None:
        """Move the weights of routed experts into the arena, if there is one."""
        if self._placement is not None:
            self._placement.place_units(units)

    def add(self, name: str, units: Units) -> None:
        """Let units of a layer be dropped, if any may."""
        if self.pages is not None:
            self.by_layer.setdefault(name, []).append(units)

    def of_placed(
        self, name: str, weight: torch.Tensor, segments: tuple[Segment, ...]
    ) -> RawUnits | None:
        """Add the units of a weight whose rows are kept unit by unit. None: it is not in the
        arena.
        """
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
        logits: SharedLinear | None,
    ) -> RawUnits:
        """Return the units of a weight that is looked up in.

        `logits`: with the same weight. If they read the same memory, their units are the table's.
        """
        if isinstance(logits, StridedColumns) and logits.units is not None:
            return logits.units
        units = RawUnits.of_rows(weight, segments, self.pages)
        self.add(name, units)
        return units
