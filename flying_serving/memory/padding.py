"""Which pages of a weight have to stay on a device that keeps some of its units, and which it can
give away.

A weight lies in memory unit by unit (`layout/shards.py`) and begins with a page. Units seldom end
where pages do. `packed` leaves no room between them: a page that a kept unit shares with others
stays. `padded` lets every unit begin with a page (Gyges, arXiv 2509.19729, equation 2): its zeros
are whole rows, so that the product stays a plain one. Arithmetic only: no torch.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from flying_serving.layout.shards import Segment

PAGE_BYTES = 2 * 1024 * 1024
"""Smallest physical allocation of CUDA."""


@dataclass(frozen=True)
class PagedUnits:
    """Where the units of one weight lie, in bytes from its beginning.

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
        """Of all units, without padding."""
        return self.units * self.unit_bytes

    @property
    def padding_bytes(self) -> int:
        """Zeros behind all units."""
        return self.units * (self.stride_bytes - self.unit_bytes)

    @property
    def pages(self) -> int:
        """Pages of the weight; the last one may be used in part."""
        return -(-self.units * self.stride_bytes // self.page_bytes)

    def bytes_of(self, unit: int) -> range:
        """Where a unit lies."""
        begin = unit * self.stride_bytes
        return range(begin, begin + self.unit_bytes)

    def pages_of(self, unit: int) -> range:
        """Pages that have bytes of a unit."""
        where = self.bytes_of(unit)
        return range(where.start // self.page_bytes, -(-where.stop // self.page_bytes))

    def resident(self, kept: Collection[int]) -> frozenset[int]:
        """Pages that stay on a device that keeps these units."""
        return frozenset(page for unit in kept for page in self.pages_of(unit))

    def dropped(self, kept: Collection[int]) -> frozenset[int]:
        """Pages that it gives away: the other ones."""
        return frozenset(range(self.pages)) - self.resident(kept)

    def stranded_bytes(self, kept: Collection[int]) -> int:
        """Bytes of other units that stay, as they share a page with a kept one."""
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
    """Units one behind the other; `row_bytes` of each row of the segment."""
    unit_bytes = segment.unit_size * row_bytes
    return PagedUnits(segment.units, unit_bytes, unit_bytes, page_bytes)


def padded(segment: Segment, row_bytes: int, page_bytes: int = PAGE_BYTES) -> PagedUnits:
    """Units with as many rows of zeros behind each as let the next one begin with a page; arguments
    as in `packed`.
    """
    unit_bytes = segment.unit_size * row_bytes
    whole_bytes = math.lcm(row_bytes, page_bytes)
    return PagedUnits(
        segment.units, unit_bytes, -(-unit_bytes // whole_bytes) * whole_bytes, page_bytes
    )
