"""Weights in an arena of a CUDA device, of which a group gives pages to KV while it lends them.

Not run on CUDA: see docs/design/cuda.md.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch

from flying_serving.errors import IntegrityError
from flying_serving.memory.cuda_arena import CudaArena
from flying_serving.weights.lending.pages import Extent
from flying_serving.weights.lending.weight_file import WeightFile

ALIGNED_BYTES = 256
"""As torch aligns tensors of a device."""
STAGED_BYTES = 32 * 1024 * 1024
"""Memory of the host through which bytes pass between the file and the device."""


class DevicePages:
    """Pages of weights that lie one after the other in `arena`: `WeightPages`.

    The rows of a weight that the widest lane of this worker works on are *kept*. Pages between
    them are extents of their own, so they can be released.

    `staging`: int8, memory of the host (pinned) through which bytes go to the file and come back.
    """

    def __init__(self, arena: CudaArena, file: WeightFile, staging: torch.Tensor) -> None:
        self._arena = arena
        self._file = file
        self._staging = staging
        self._used_bytes = 0
        self.page_bytes = arena.page_bytes

    def place(self, weight: torch.Tensor, kept: Sequence[slice]) -> torch.Tensor:
        """Copy a weight into the arena, and return the copy, which is contiguous.

        `kept`: the rows (of the first dimension) that are never dropped, in their order.

        Raises:
            DeviceMemory: if the device has no room for it.
        """
        first, size_bytes = self._used_bytes, weight.numel() * weight.element_size()
        row_bytes = size_bytes // weight.shape[0]
        for rows in _between(kept, weight.shape[0]):
            start = first + rows.start * row_bytes
            for pages in self._whole_pages(start, len(rows) * row_bytes):
                self._arena.back(*pages)
        self._arena.back(first, size_bytes)
        self._used_bytes += -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
        placed = self._arena.tensor(first, size_bytes).view(weight.dtype).view(weight.shape)
        return placed.copy_(weight)

    def holds(self, weight: torch.Tensor) -> bool:
        """Return whether a weight lies in the arena."""
        return 0 <= weight.data_ptr() - self._arena.address < self._used_bytes

    def keep(self, weight: torch.Tensor) -> Extent:
        """Note a weight in the arena, and write its bytes into the file if this engine writes.

        Raises:
            WeightFileError: if there is no room, naming the directory.
        """
        assert weight.is_contiguous()
        size_bytes = weight.numel() * weight.element_size()
        extent = Extent(weight.data_ptr(), self._file.add(size_bytes), size_bytes)
        if self._file.writes:
            for part, offset_bytes in self._parts(extent):
                staged = self._staging[: len(part)].copy_(part)
                self._file.write(offset_bytes, memoryview(staged.numpy()))
        return extent

    def drop(self, pages: Extent) -> None:
        """Release pages of which none is kept, when no step reads them any more.

        Raises:
            IntegrityError: if they are no whole extents.
        """
        place = self._place_of(pages), pages.size_bytes
        self._arena.release(*place)
        if self._arena.backs(*place):
            raise IntegrityError(
                f"{pages.size_bytes} bytes of a weight are no whole extents: some were not released"
            )

    def fetch(self, pages: Extent) -> None:
        """Back pages again and fill them from the file. Raises WeightFileError if that fails."""
        self._arena.back(self._place_of(pages), pages.size_bytes)
        for part, offset_bytes in self._parts(pages):
            staged = self._staging[: len(part)]
            self._file.read_at(offset_bytes, memoryview(staged.numpy()))
            part.copy_(staged)

    def _parts(self, extent: Extent) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield parts that fit into the staging memory, each with its place in the file."""
        if not extent.size_bytes:
            return
        whole = self._arena.tensor(self._place_of(extent), extent.size_bytes)
        offset_bytes = extent.offset_bytes
        for part in whole.split(len(self._staging)):
            yield part, offset_bytes
            offset_bytes += len(part)

    def _place_of(self, extent: Extent) -> int:
        return extent.address - self._arena.address

    def _whole_pages(self, first_byte: int, size_bytes: int) -> Iterator[tuple[int, int]]:
        start = -(-first_byte // self.page_bytes) * self.page_bytes
        stop = (first_byte + size_bytes) // self.page_bytes * self.page_bytes
        if start < stop:
            yield start, stop - start


def _between(kept: Sequence[slice], rows: int) -> Iterator[range]:
    """Yield the rows before, between and behind kept ones."""
    ends = [slice(0, 0), *kept, slice(rows, rows)]
    for before, after in pairwise(ends):
        if before.stop < after.start:
            yield range(before.stop, after.start)
