"""Memory of a CUDA device whose addresses stay while its pages come and go, here and in a peer that
maps it. Not run on CUDA in this version: see docs/design/cuda.md.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from flying_serving.errors import DeviceMemory, IntegrityError
from flying_serving.memory.arena import pages_inside, pages_touched
from flying_serving.memory.cuda_device import CudaDevice


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of an arena that have memory: the first one, and their number."""

    first_byte: int
    size_bytes: int


@dataclass(frozen=True)
class _Extent:
    """Consecutive pages that the driver has created, and can free, as a whole."""

    pages: range
    handle: Any


class CudaArena:
    """Addresses for `size_bytes` of a device, without memory at first: a `PagedMemory`.

    Pages that one call of `back` adds in a row are one extent, which is released as a whole.
    `address`: the first one. `page_bytes`: as of the device.

    Raises:
        DeviceMemory: in every method, if the driver refuses a call.
    """

    backs_on_use = False

    def __init__(self, device: CudaDevice, size_bytes: int) -> None:
        self._device = device
        self._extents: list[_Extent] = []
        self.size_bytes = size_bytes
        self.page_bytes = device.page_bytes
        self._reserved_bytes = device.whole_pages_bytes(size_bytes)
        self.address = device.reserve(self._reserved_bytes)

    @property
    def backed_bytes(self) -> int:
        """Bytes of the pages that have memory."""
        return sum(len(extent.pages) for extent in self._extents) * self.page_bytes

    def back(self, first_byte: int, size_bytes: int) -> None:
        """See `PagedMemory`. If the driver refuses, the arena has the pages that it had before."""
        self._require_inside(first_byte, size_bytes)
        with ExitStack() as undo:
            for pages in self._missing(pages_touched(first_byte, size_bytes, self.page_bytes)):
                undo.callback(self._unmap, self._map(pages))
            undo.pop_all()
        self._extents.sort(key=lambda extent: extent.pages.start)

    def release(self, first_byte: int, size_bytes: int) -> int:
        """See `PagedMemory`. No step may use the range; steps under way are waited for.

        An extent of which a page lies outside of the range stays. The last page of the arena has no
        bytes behind the arena's end.
        """
        self._require_inside(first_byte, size_bytes)
        if first_byte + size_bytes == self.size_bytes:
            size_bytes = self._reserved_bytes - first_byte
        inside = pages_inside(first_byte, size_bytes, self.page_bytes)
        released = [
            extent
            for extent in self._extents
            if inside.start <= extent.pages.start and extent.pages.stop <= inside.stop
        ]
        if released:
            self._device.synchronize()
        for extent in released:
            self._unmap(extent)
        return sum(len(extent.pages) for extent in released) * self.page_bytes

    def backs(self, first_byte: int, size_bytes: int) -> bool:
        """Return whether a byte of a range has memory."""
        pages = pages_touched(first_byte, size_bytes, self.page_bytes)
        return sum(map(len, self._missing(pages))) < len(pages)

    def tensor(self, first_byte: int, size_bytes: int) -> torch.Tensor:
        """Return an int8 tensor over a range, of which the first byte has memory."""
        self._require_inside(first_byte, size_bytes)
        return self._device.tensor(self.address + first_byte, size_bytes, self)

    def share(self) -> dict[Piece, int]:
        """Return a file descriptor of each extent, for other processes. The caller closes them."""
        shared: dict[Piece, int] = {}
        with ExitStack() as undo:
            for extent in self._extents:
                piece = Piece(
                    extent.pages.start * self.page_bytes, len(extent.pages) * self.page_bytes
                )
                shared[piece] = self._device.export(extent.handle)
                undo.callback(os.close, shared[piece])
            undo.pop_all()
        return shared

    def close(self) -> None:
        """Free all memory and the addresses, once. A refusal of the driver is raised at the end."""
        with ExitStack() as steps:  # the last one is made first
            steps.callback(self._device.free_addresses, self.address, self._reserved_bytes)
            for extent in list(self._extents):
                steps.callback(self._unmap, extent)
            steps.callback(self._device.synchronize)

    def _missing(self, pages: range) -> Iterator[range]:
        """Yield the runs of pages without memory."""
        start = pages.start
        for extent in [e for e in self._extents if e.pages.stop > pages.start]:
            if extent.pages.start >= pages.stop:
                break
            if extent.pages.start > start:
                yield range(start, extent.pages.start)
            start = extent.pages.stop
        if start < pages.stop:
            yield range(start, pages.stop)

    def _map(self, pages: range) -> _Extent:
        size_bytes = len(pages) * self.page_bytes
        try:
            handle = self._device.create(size_bytes)
            self._device.map(self._address_of(pages), size_bytes, handle)
        except DeviceMemory as error:
            raise DeviceMemory(
                f"{error}: {size_bytes} bytes, beside {self.backed_bytes} of an arena of "
                f"{self.size_bytes}"
            ) from None
        extent = _Extent(pages, handle)
        self._extents.append(extent)
        return extent

    def _unmap(self, extent: _Extent) -> None:
        size_bytes = len(extent.pages) * self.page_bytes
        self._device.unmap(self._address_of(extent.pages), size_bytes, extent.handle)
        self._extents.remove(extent)

    def _address_of(self, pages: range) -> int:
        return self.address + pages.start * self.page_bytes

    def _require_inside(self, first_byte: int, size_bytes: int) -> None:
        if not 0 <= first_byte <= first_byte + size_bytes <= self.size_bytes:
            raise IntegrityError(
                f"{size_bytes} bytes from {first_byte} on are not in an arena of {self.size_bytes}"
            )


class PeerArena:
    """The arena of another process, mapped for a device of this one as far as it was shared.

    `tensor`: int8, over all `size_bytes`. Only bytes of `pieces` have memory. The memory is
    unmapped with the last tensor over it.

    Raises:
        DeviceMemory: if the driver refuses a call. The descriptors stay the caller's.
    """

    def __init__(
        self, device: CudaDevice, size_bytes: int, pieces: Sequence[Piece], descriptors: list[int]
    ) -> None:
        reserved_bytes = device.whole_pages_bytes(size_bytes)
        self._mapped: list[tuple[int, int, Any]] = []
        self._address = device.reserve(reserved_bytes)
        self._size_bytes = size_bytes
        self._device = device
        self._end = weakref.finalize(
            self, _unmap_all, device, (self._address, reserved_bytes), self._mapped
        )
        self._end.atexit = False  # the driver frees the memory of a process that ends
        try:
            for piece, descriptor in zip(pieces, descriptors, strict=True):
                handle = device.import_from(descriptor)
                address = self._address + piece.first_byte
                device.map(address, piece.size_bytes, handle)
                self._mapped.append((address, piece.size_bytes, handle))
        except DeviceMemory:
            self._end()
            raise

    def tensor(self) -> torch.Tensor:
        """Return the memory, which stays mapped while a tensor over it exists."""
        return self._device.tensor(self._address, self._size_bytes, self)


def _unmap_all(
    device: CudaDevice, reserved: tuple[int, int], mapped: list[tuple[int, int, Any]]
) -> None:
    """Unmap what was mapped, when no step reads it any more."""
    if mapped:
        device.synchronize()
    for address, size_bytes, handle in mapped:
        device.unmap(address, size_bytes, handle)
    device.free_addresses(*reserved)
