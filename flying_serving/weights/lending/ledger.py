"""Owners of the pages that a device's weights can do without while it is in a group: weights, KV,
or none. Pure.

Weights go in *pieces*, one after another, and come back in the opposite order. KV gets their room
as whole blocks, the *extra* ones, from the first on. Each layer has a region of its own for them.
"""

import mmap
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from flying_serving.errors import IntegrityError


@dataclass(frozen=True)
class ExtraKV:
    """Extra blocks: at most `most_blocks`. `region_bytes`: of a block, in each of the regions."""

    most_blocks: int
    region_bytes: Sequence[int]

    def pages(self, blocks: int, page_bytes: int) -> int:
        """Return the pages that `blocks` blocks take at most: in each region they may begin and end
        within a page.
        """
        if not blocks:
            return 0
        return sum(-(-blocks * size // page_bytes) + 1 for size in self.region_bytes)


class PageLedger:
    """The pages of one device that change owner; every device of an engine has the same.

    `piece_bytes`: bytes that each piece of weights frees, in the order in which pieces go.
    `dropped`: number of pieces that are gone. `blocks`: number of extra blocks that are there.
    """

    def __init__(
        self, piece_bytes: Sequence[int], kv: ExtraKV, page_bytes: int = mmap.PAGESIZE
    ) -> None:
        self._freed_pages = [0, *accumulate(size // page_bytes for size in piece_bytes)]
        self._kv = kv
        self._page_bytes = page_bytes
        self.dropped = 0
        self.blocks = 0

    @property
    def pieces(self) -> int:
        """Number of pieces of weights that can go."""
        return len(self._freed_pages) - 1

    @property
    def most_blocks(self) -> int:
        """Number of extra blocks when all pieces are gone."""
        return self.room(self.pieces)

    @property
    def lent_bytes(self) -> int:
        """Bytes of the pages of pieces that are gone."""
        return self._freed_pages[self.dropped] * self._page_bytes

    @property
    def kv_pages(self) -> int:
        """Number of pages that extra blocks take at most."""
        return self._kv.pages(self.blocks, self._page_bytes)

    @property
    def free_pages(self) -> int:
        """Number of pages that pieces have left and extra blocks do not take."""
        return self._freed_pages[self.dropped] - self.kv_pages

    def room(self, dropped: int) -> int:
        """Return the number of extra blocks that there may be when `dropped` pieces are gone."""
        counts = range(self._kv.most_blocks + 1)
        pages = partial(self._kv.pages, page_bytes=self._page_bytes)
        return bisect_right(counts, self._freed_pages[dropped], key=pages) - 1

    def drop(self) -> int:
        """Drop the next piece, and return its number. Raises IntegrityError if all are gone."""
        if self.dropped == self.pieces:
            raise IntegrityError(f"all {self.pieces} pieces of weights are gone")
        self.dropped += 1
        return self.dropped - 1

    def fetch(self) -> int:
        """Fetch the piece that went last, and return its number. Raises IntegrityError if KV owns
        its pages.
        """
        if not self.dropped or self.blocks > self.room(self.dropped - 1):
            raise IntegrityError(
                f"{self.dropped} pieces of weights are gone, and KV has {self.blocks} extra blocks"
            )
        self.dropped -= 1
        return self.dropped

    def back(self) -> range:
        """Add as many extra blocks as there is room for. Returns the new ones; 0 is the first extra
        block.
        """
        before, self.blocks = self.blocks, max(self.blocks, self.room(self.dropped))
        return range(before, self.blocks)

    def release(self, blocks: int) -> range:
        """Remove all but the first `blocks` extra blocks, which must be empty. Returns the removed
        ones.
        """
        before, self.blocks = self.blocks, min(self.blocks, blocks)
        return range(self.blocks, before)

    def check(self) -> None:
        """Raise IntegrityError if a page has two owners."""
        if self.free_pages < 0:
            raise IntegrityError(f"{-self.free_pages} pages belong to weights and to KV")
