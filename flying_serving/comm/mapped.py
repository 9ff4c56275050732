"""Files in shared memory that several processes map."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from flying_serving.errors import SharedMemoryFull


def reserve(file: int, path: str, size_bytes: int) -> None:
    """Give an open file `size_bytes` that exist, zeros at first; one that has them stays as it is.

    A file that is only given a length gets its pages at the first use, and a process that uses one when there is no
    room left is killed (SIGBUS).

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
            f"{path}: {size_bytes} bytes are needed, {found.f_bavail * found.f_frsize} are free in {Path(path).parent}"
        ) from None
