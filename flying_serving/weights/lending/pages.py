"""Whole pages inside the memory of a weight: given back to the system, and written again in
place.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass

from flying_serving.errors import IntegrityError

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Extent:
    """Bytes of a weight: their address in memory, and their place in the weight file."""

    address: int
    offset_bytes: int
    size_bytes: int

    @property
    def bytes(self) -> memoryview:
        """The bytes in memory, to be written."""
        return memoryview((ctypes.c_char * self.size_bytes).from_address(self.address))


def whole_pages(extents: Iterable[Extent], page_bytes: int = mmap.PAGESIZE) -> list[Extent]:
    """Return the whole pages inside extents; extents that follow each other in memory and in the
    file are joined.

    The pages at the ends of a run stay, as they are shared with kept units, or with other memory of
    the process.
    """
    pages = []
    for run in _joined(extents):
        before = -run.address % page_bytes
        size_bytes = (run.size_bytes - before) // page_bytes * page_bytes
        if size_bytes > 0:
            pages.append(Extent(run.address + before, run.offset_bytes + before, size_bytes))
    return pages


def _joined(extents: Iterable[Extent]) -> list[Extent]:
    runs: list[Extent] = []
    for extent in sorted((e for e in extents if e.size_bytes), key=lambda e: e.address):
        last = runs[-1] if runs else Extent(0, 0, 0)
        follows = (last.address + last.size_bytes, last.offset_bytes + last.size_bytes)
        if runs and follows == (extent.address, extent.offset_bytes):
            runs[-1] = Extent(last.address, last.offset_bytes, last.size_bytes + extent.size_bytes)
        else:
            runs.append(extent)
    return runs


def drop_pages(extent: Extent) -> None:
    """Give whole pages of private memory back to the system: they read as zeros until they are
    written again.

    Raises:
        IntegrityError: if the system does not take them, as with locked memory.
    """
    address, size = ctypes.c_void_p(extent.address), ctypes.c_size_t(extent.size_bytes)
    if _LIBC.madvise(address, size, mmap.MADV_DONTNEED):
        raise IntegrityError(
            f"{extent.size_bytes} bytes of a weight: madvise: {os.strerror(ctypes.get_errno())}"
        )
