"""Memory that other processes of the node can map: a memfd, which unlike a file in /dev/shm has no limit of its own."""

import mmap
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from flying_serving.errors import PeerMemory


class Address(msgspec.Struct, frozen=True):
    """Where memory can be opened: a file descriptor of a process, and its size."""

    pid: int
    descriptor: int
    size_bytes: int


class Arena:
    """Memory of this process, zeros at first, that processes which know its `address` can map.

    Its pages exist from their first use on. `bytes` is the mapping.
    """

    def __init__(self, name: str, size_bytes: int) -> None:
        self._file = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self._file, size_bytes)
        self.bytes = mmap.mmap(self._file, size_bytes)
        with suppress(OSError):  # as far as the system has them, and allows them for shared memory
            self.bytes.madvise(mmap.MADV_HUGEPAGE)
        self.address = Address(os.getpid(), self._file, size_bytes)


def map_peer(address: Address, whose: str) -> mmap.mmap:
    """Map the memory of another process, to read it; it stays readable when that process ends.

    Raises:
        PeerMemory: naming whose it is, if that cannot be opened.
    """
    path = f"/proc/{address.pid}/fd/{address.descriptor}"
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise PeerMemory(
            f"{whose}: {path} cannot be opened ({error.strerror}); all processes of a server must see each other "
            "and belong to one user"
        ) from None
    try:
        return mmap.mmap(file, address.size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(file)


def announce(path: str, what: msgspec.Struct) -> None:
    """Write a file that peers find whole or not at all."""
    hidden = Path(f"{path}.new")
    hidden.write_bytes(msgspec.json.encode(what))
    hidden.rename(path)
