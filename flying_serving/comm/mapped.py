"""Files in shared memory that several processes map."""

import errno
import mmap
import os
from pathlib import Path
from typing import Any, Literal

from flying_serving.errors import SharedMemoryFull


def reserve(file: int, path: str, size_bytes: int) -> None:
    """Give an open file `size_bytes` that exist, zeros at first; a file that has them stays as it
    is.

    A file that is only given a length gets its pages at the first use. A process that uses a page
    when there is no room left is killed (SIGBUS).

    Raises:
        SharedMemoryFull: if there is no room.
    """
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        found = os.fstatvfs(file)
        raise SharedMemoryFull(
            f"{path}: {size_bytes} bytes are needed, {found.f_bavail * found.f_frsize} are free "
            f"in {Path(path).parent}"
        ) from None


class MappedArray:
    """`count` numbers of 8 bytes in a file that processes map, zeros at first; `code`: their type,
    as in `struct`.
    """

    def __init__(self, path: str, count: int, code: Literal["d", "Q"]) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        size_bytes = max(8 * count, mmap.PAGESIZE)
        reserve(self.file, path, size_bytes)
        self._map = mmap.mmap(self.file, size_bytes)
        self.numbers: memoryview[Any] = memoryview(self._map).cast(code)

    def close(self) -> None:
        """Unmap and close the file."""
        self.numbers.release()
        self._map.close()
        os.close(self.file)
