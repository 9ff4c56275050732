"""One total order for everything that engines do together.

A leader that wants its group to act takes one number per member, all at once, under a lock of the node. A member acts
in the order of its own numbers, in whatever order messages came, and from any sender. Two groups that share two
members therefore meet in the same order at both, so engines never wait for each other in a cycle.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence

from flying_serving.comm.mapped import reserve

_ENTRY_BYTES = 8  # one unsigned 64-bit number per engine


class SequenceNumbers:
    """Sequence numbers of messages, shared by all engines of a server through one small file.

    The lock belongs to the open file, so the kernel releases it when its holder dies.
    """

    def __init__(self, path: str, engines: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        size = max(engines * _ENTRY_BYTES, mmap.PAGESIZE)
        reserve(self._file, path, size)
        self._map = mmap.mmap(self._file, size)
        self._next = memoryview(self._map).cast("Q")

    def take(self, members: Sequence[int]) -> list[int]:
        """The next number of each member, taken in one step: no other leader's numbers fall between them."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            numbers = [self._next[m] for m in members]
            for member, number in zip(members, numbers, strict=True):
                self._next[member] = number + 1
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        return numbers

    def taken(self, member: int) -> int:
        """How many numbers of a member have been taken: their messages are there or on their way."""
        return self._next[member]

    def close(self) -> None:
        """Unmap and close the file."""
        self._next.release()
        self._map.close()
        os.close(self._file)
