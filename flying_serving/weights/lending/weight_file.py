"""A file with the weights that engines may drop, from which they are fetched back."""

import mmap
import os
import tempfile
from pathlib import Path

import torch

from flying_serving.errors import PeerMemory, WeightFileError
from flying_serving.memory.arena import Address, announce, announced
from flying_serving.weights.lending.pages import Extent, drop_pages


class WeightFile:
    """The weights of one device of an engine, which are those of this device of every engine.

    One engine, which `writes`, writes them once into a file in `directory`, and the others open it.
    The file has no name, so it is gone with the last process of the server. Every engine keeps the
    same weights in the same order, so a weight is at the same place for all.

    It is the `WeightPages` of weights in private memory of the process.
    """

    page_bytes = mmap.PAGESIZE

    def __init__(self, directory: str, run_dir: str, device: int, *, writes: bool) -> None:
        self._directory = directory
        self._path = f"{run_dir}/weights-{device}"
        self._whose = f"weights of engine 0 device {device}"
        self._file: int | None = self._create() if writes else None
        self.writes = writes
        self.size_bytes = 0

    def _create(self) -> int:
        try:
            file, path = tempfile.mkstemp(prefix="flying-weights-", dir=self._directory)
        except OSError as error:
            raise self._failed(error) from None
        os.unlink(path)
        return file

    def keep(self, weight: torch.Tensor) -> Extent:
        """Note a weight that lies in one piece, and write its bytes if this engine writes.

        Raises:
            WeightFileError: if there is no room, naming the directory.
        """
        assert weight.is_contiguous()
        size_bytes = weight.numel() * weight.element_size()
        extent = Extent(weight.data_ptr(), self.add(size_bytes), size_bytes)
        if self.writes and size_bytes:
            self.write(extent.offset_bytes, extent.bytes)
        return extent

    def add(self, size_bytes: int) -> int:
        """Note the next bytes, which an engine that writes has to write. Return their place."""
        offset_bytes, self.size_bytes = self.size_bytes, self.size_bytes + size_bytes
        return offset_bytes

    def write(self, offset: int, left: memoryview) -> None:
        """Write bytes at a place. Raises WeightFileError if there is no room."""
        assert self._file is not None
        while left:  # one call writes 2 GiB at most
            try:
                written = os.pwrite(self._file, left, offset)
            except OSError as error:
                raise self._failed(error) from None
            left, offset = left[written:], offset + written

    def _failed(self, error: OSError) -> WeightFileError:
        found = os.statvfs(self._directory) if Path(self._directory).is_dir() else None
        free = "" if found is None else f"; {found.f_bavail * found.f_frsize} bytes are free"
        return WeightFileError(
            f"--lend-weights: {self._directory}: {str(error.strerror).lower()}{free}; it must "
            "have room for the "
            "model's weights (TMPDIR names another directory)"
        )

    def announce(self) -> None:
        """Let the other engines open the file, when all weights are kept."""
        if self.writes:
            assert self._file is not None
            announce(self._path, Address(os.getpid(), self._file, self.size_bytes))

    def open(self) -> None:
        """Open the file of the engine that writes, unless this one does.

        Raises:
            PeerMemory: if it cannot be opened.
            WeightFileError: if that engine has kept other weights.
        """
        if self._file is not None:
            return
        address = announced(self._path, Address, self._whose)
        if address.size_bytes != self.size_bytes:
            raise WeightFileError(
                f"{self._whose}: {address.size_bytes} bytes, {self.size_bytes} in this engine"
            )
        path = f"/proc/{address.pid}/fd/{address.descriptor}"
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise PeerMemory(f"{self._whose}: {path} cannot be opened ({error.strerror})") from None

    def drop(self, pages: Extent) -> None:
        """See `drop_pages`."""
        drop_pages(pages)

    def fetch(self, extent: Extent) -> None:
        """Write the file's bytes of an extent into memory. The system backs pages that are written.

        Raises:
            WeightFileError: if the file does not have all of it, or was not opened.
        """
        self.read_at(extent.offset_bytes, extent.bytes)

    def read_at(self, offset: int, left: memoryview) -> None:
        """Fill memory with the file's bytes from a place on. Raises WeightFileError as `fetch`."""
        while left:
            try:
                count = 0 if self._file is None else os.preadv(self._file, [left], offset)
            except OSError as error:
                raise WeightFileError(f"{self._whose}: {error.strerror}") from None
            if not count:
                raise WeightFileError(
                    f"{self._whose}: the file ends before byte {offset + len(left)}"
                )
            left, offset = left[count:], offset + count

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
