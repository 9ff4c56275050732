"""Whether another process lives: it holds a byte of an open file locked, which the kernel drops
when it ends.
"""

import fcntl
import os
import struct


def hold(file: int, place: int) -> None:
    """Hold a byte of an open file, which may be behind its end, until the file is closed. Raises
    OSError if held.
    """
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock_of(place))


def is_held(file: int, place: int) -> bool:
    """Whether a byte is held through another opening of the file."""
    found: bytes = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _lock_of(place))
    return struct.unpack_from("h", found) != (fcntl.F_UNLCK,)


def _lock_of(place: int) -> bytes:
    """The C `struct flock` for a byte."""
    return struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
