"""Units of a weight that a lane can do without for a while: dropped, and fetched back with the same
bits.

A product that is asked for while a unit of it is dropped raises, for every kind of unit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, Protocol, TypeVar

import torch

from flying_serving.errors import IntegrityError
from flying_serving.layout.shards import Segment
from flying_serving.weights.lending.pages import Extent, whole_pages

Product = Callable[[torch.Tensor, torch.Tensor], None]
"""Write the product of (tokens, in) into (tokens, out), which lies in one piece."""
Pack = Callable[[torch.Tensor, torch.Tensor | None], Product]
"""Turn a weight (out, in) and a bias (out) into a product that does not need the weight any
more.
"""
Keeper = TypeVar("Keeper")
UnitId = tuple[int, int]
"""The number of a segment, and of a unit of it."""


class Units(Protocol):
    """The units of one weight, as far as bytes go. `rank` of `degree`: the rank whose units are
    kept.
    """

    def lendable(self, rank: int, degree: int) -> int:
        """Return the bytes that `drop` frees if nothing is dropped yet."""

    def drop(self, rank: int, degree: int) -> int:
        """Free the units that the rank does not need; return their bytes. Raises IntegrityError if
        no unit may be dropped.
        """

    def fetch(self) -> int:
        """Fetch every dropped unit back; return the bytes that were read. Raises WeightFileError if
        that fails.
        """


class WeightPages(Protocol):
    """The memory that weights lie in, in pages of `page_bytes`, and a copy of it elsewhere."""

    @property
    def page_bytes(self) -> int: ...
    def keep(self, weight: torch.Tensor) -> Extent:
        """Note a weight that lies in one piece, and see that it can be fetched back. Raises
        WeightFileError if it cannot be.
        """

    def drop(self, pages: Extent) -> None:
        """Free whole pages, of which some may be free. Raises IntegrityError if one stays."""

    def fetch(self, pages: Extent) -> None:
        """Fetch whole pages back in place. Raises WeightFileError if that fails."""


def units_of(segments: Sequence[Segment], rank: int, degree: int) -> set[UnitId]:
    """Return the units that a rank works on."""
    return {
        (place, unit)
        for place, segment in enumerate(segments)
        for unit in segment.units_of(rank, degree)
    }


def rows_of_units(segments: Sequence[Segment]) -> dict[UnitId, slice]:
    """Return the rows of each unit in the fused weight."""
    rows, start = {}, 0
    for place, segment in enumerate(segments):
        for unit in range(segment.units):
            rows[place, unit] = slice(start, start + segment.unit_size)
            start += segment.unit_size
    return rows


def _lent(*_: object) -> NoReturn:
    raise IntegrityError(
        "a product with weights that are lent to the KV cache: this lane must not step"
    )


def _require_kept(keeper: Keeper | None) -> Keeper:
    if keeper is None:
        raise IntegrityError(
            "weights that are in no weight file cannot be dropped: they could not be fetched back"
        )
    return keeper


class PackedUnit:
    """One unit in the library's format, which cannot be read back: `multiply`, which only raises
    while it is dropped.

    `pages`: keep the weight; None: the unit is never dropped.
    """

    __slots__ = (
        "_bias",
        "_dtype",
        "_extent",
        "_pack",
        "_pages",
        "_shape",
        "multiply",
        "size_bytes",
    )

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, pack: Pack, pages: WeightPages | None
    ) -> None:
        self._shape, self._dtype = weight.shape, weight.dtype
        self._bias, self._pack, self._pages = bias, pack, pages
        self.size_bytes = weight.numel() * weight.element_size()
        self._extent = None if pages is None else pages.keep(weight)
        self.multiply: Product = pack(weight, bias)

    @property
    def is_dropped(self) -> bool:
        """True if there is nothing to multiply with."""
        return self.multiply is _lent

    def drop(self) -> None:
        """Release the unit in the library's format: there is no other reference to it."""
        _require_kept(self._pages)
        self.multiply = _lent

    def fetch(self) -> None:
        """Read the weight and pack it again."""
        assert self._extent is not None
        weight = torch.empty(self._shape, dtype=self._dtype)
        _require_kept(self._pages).fetch(
            Extent(weight.data_ptr(), self._extent.offset_bytes, self.size_bytes)
        )
        self.multiply = self._pack(weight, self._bias)


class PackedUnits:
    """`Units` that are packed each by itself, for each segment; segments that are packed together
    count as one.
    """

    def __init__(self, families: Sequence[tuple[Segment, Sequence[PackedUnit]]]) -> None:
        self._families = tuple(families)

    def _others(self, rank: int, degree: int) -> list[PackedUnit]:
        """Return the units that a rank does not need."""
        return [
            unit
            for segment, units in self._families
            for number, unit in enumerate(units)
            if number not in segment.units_of(rank, degree)
        ]

    def lendable(self, rank: int, degree: int) -> int:
        """Return the bytes of the weight that `drop` frees: see `Units`."""
        return sum(unit.size_bytes for unit in self._others(rank, degree))

    def drop(self, rank: int, degree: int) -> int:
        """Drop units, and return the bytes of the weight: those in the library's format are
        unknown. See `Units`.
        """
        there = [unit for unit in self._others(rank, degree) if not unit.is_dropped]
        for unit in there:
            unit.drop()
        return sum(unit.size_bytes for unit in there)

    def fetch(self) -> int:
        """Read the dropped units and pack them again: see `Units`."""
        dropped = [unit for _, units in self._families for unit in units if unit.is_dropped]
        for unit in dropped:
            unit.fetch()
        return sum(unit.size_bytes for unit in dropped)


class RawUnits:
    """`Units` of tensors that are used as they are, of which whole pages are dropped.

    `tensors`: of each unit, each in one piece. They are written back in place, so views of them
    stay valid. `pages`: the memory they lie in; None: they are never dropped.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        tensors: Mapping[UnitId, Sequence[torch.Tensor]],
        pages: WeightPages | None,
    ) -> None:
        self._segments, self._memory = tuple(segments), pages
        self._tensors = dict(tensors)  # an address must not be given to another tensor
        self._extents: dict[UnitId, list[Extent]] = {}
        if pages is not None:
            self._extents = {
                unit: [pages.keep(tensor) for tensor in held] for unit, held in tensors.items()
            }
        self._missing: set[UnitId] = set()
        self._dropped: list[Extent] = []

    @classmethod
    def of_rows(
        cls,
        weight: torch.Tensor,
        segments: Sequence[Segment],
        pages: WeightPages | None,
        rows: Mapping[UnitId, slice] | None = None,
    ) -> "RawUnits":
        """Return the units of one weight, each of which is a run of rows.

        `rows`: of each unit; None: one segment lies after the other.
        """
        if pages is None:
            return cls(segments, {}, None)
        placed = sorted((rows or rows_of_units(segments)).items(), key=lambda unit: unit[1].start)
        return cls(segments, {unit: [weight[place]] for unit, place in placed}, pages)

    def guard(self, rank: int, degree: int) -> Callable[[], None]:
        """Return a check that raises IntegrityError while a unit that a rank works on is dropped;
        call it before a read.
        """
        missing, mine = self._missing, units_of(self._segments, rank, degree)

        def check() -> None:
            if missing and not missing.isdisjoint(mine):
                _lent()

        return check

    def _pages(self, units: set[UnitId]) -> list[Extent]:
        if self._memory is None:
            return []
        extents = (extent for unit in units for extent in self._extents[unit])
        return whole_pages(extents, self._memory.page_bytes)

    def lendable(self, rank: int, degree: int) -> int:
        """Return the bytes of whole pages that `drop` frees: see `Units`."""
        return sum(pages.size_bytes for pages in self._pages(self._others(rank, degree)))

    def _others(self, rank: int, degree: int) -> set[UnitId]:
        return self._extents.keys() - units_of(self._segments, rank, degree)

    def drop(self, rank: int, degree: int) -> int:
        """Drop whole pages; the pages at the ends stay (Gyges pads units to whole pages, its Eq.
        2). See `Units`.
        """
        memory = _require_kept(self._memory)
        before_bytes = sum(pages.size_bytes for pages in self._dropped)
        self._missing |= self._others(rank, degree)
        self._dropped = self._pages(self._missing)
        for pages in self._dropped:
            memory.drop(pages)
        return sum(pages.size_bytes for pages in self._dropped) - before_bytes

    def fetch(self) -> int:
        """Read the dropped pages back in place: see `Units`."""
        for pages in self._dropped:
            _require_kept(self._memory).fetch(pages)
        size_bytes = sum(pages.size_bytes for pages in self._dropped)
        self._missing.clear()
        self._dropped = []
        return size_bytes
