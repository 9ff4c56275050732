"""A sign that a process lives: it holds a byte of an open file locked, and the kernel drops the
lock when it ends.
"""

import fcntl
import os
import struct


def hold(file: int, byte: int) -> None:
    """Hold a byte of an open file until the file is closed; the byte may be behind the file's end.

    Raises OSError if the byte is held.
    """
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock_of(byte))


def is_held(file: int, byte: int) -> bool:
    """Return whether a byte is held through another opening of the file."""
    found: bytes = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _lock_of(byte))
    return struct.unpack_from("h", found) != (fcntl.F_UNLCK,)


def _lock_of(byte: int) -> bytes:
    """Return the C `struct flock` for a byte."""
    return struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
