"""The pages of a weight that stay on a device that keeps some of its units, and the pages that it
can give away.

A weight lies in memory unit by unit (`layout/shards.py`) and begins with a page. Units seldom end
where pages do. `packed` leaves no room between them: a page that a kept unit shares with others
stays. `padded` lets every unit begin with a page (Gyges, arXiv 2509.19729, equation 2). Its zeros
are whole rows, so that the product stays a plain one. Arithmetic only: no torch.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from flying_serving.layout.shards import Segment

PAGE_BYTES = 2 * 1024 * 1024
"""Bytes of the smallest physical allocation of CUDA."""


@dataclass(frozen=True)
class PagedUnits:
    """The places of the units of one weight, in bytes from its beginning.

    Args:
        units: how many.
        unit_bytes: of one, without padding.
        stride_bytes: from the beginning of one to that of the next.
        page_bytes: of one page.
    """

    units: int
    unit_bytes: int
    stride_bytes: int
    page_bytes: int

    @property
    def weight_bytes(self) -> int:
        """Bytes of all units, without padding."""
        return self.units * self.unit_bytes

    @property
    def padding_bytes(self) -> int:
        """Bytes of the zeros behind all units."""
        return self.units * (self.stride_bytes - self.unit_bytes)

    @property
    def pages(self) -> int:
        """Number of pages of the weight; the last one may be used in part."""
        return -(-self.units * self.stride_bytes // self.page_bytes)

    def bytes_of(self, unit: int) -> range:
        """Return the range of bytes in which a unit lies."""
        begin = unit * self.stride_bytes
        return range(begin, begin + self.unit_bytes)

    def pages_of(self, unit: int) -> range:
        """Return the pages that have bytes of a unit."""
        where = self.bytes_of(unit)
        return range(where.start // self.page_bytes, -(-where.stop // self.page_bytes))

    def resident(self, kept: Collection[int]) -> frozenset[int]:
        """Return the pages that stay on a device that keeps these units."""
        return frozenset(page for unit in kept for page in self.pages_of(unit))

    def dropped(self, kept: Collection[int]) -> frozenset[int]:
        """Return the pages that a device gives away that keeps these units: the other ones."""
        return frozenset(range(self.pages)) - self.resident(kept)

    def stranded_bytes(self, kept: Collection[int]) -> int:
        """Return the bytes of other units that stay, as they share a page with a kept one."""
        page = self.page_bytes
        resident = self.resident(kept)
        total = 0
        for unit in set(range(self.units)).difference(kept):
            where = self.bytes_of(unit)
            shared = resident.intersection(self.pages_of(unit))
            total += sum(
                min(where.stop, (one + 1) * page) - max(where.start, one * page) for one in shared
            )
        return total


def packed(segment: Segment, row_bytes: int, page_bytes: int = PAGE_BYTES) -> PagedUnits:
    """Lay the units one behind the other; `row_bytes`: of each row of the segment."""
    unit_bytes = segment.unit_size * row_bytes
    return PagedUnits(segment.units, unit_bytes, unit_bytes, page_bytes)


def padded(segment: Segment, row_bytes: int, page_bytes: int = PAGE_BYTES) -> PagedUnits:
    """Lay rows of zeros behind each unit, so that the next one begins with a page; arguments as in
    `packed`.
    """
    unit_bytes = segment.unit_size * row_bytes
    whole_bytes = math.lcm(row_bytes, page_bytes)
    return PagedUnits(
        segment.units, unit_bytes, -(-unit_bytes // whole_bytes) * whole_bytes, page_bytes
    )
