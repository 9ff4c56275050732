"""Memory that other processes of the node can map: a memfd, which unlike a file in /dev/shm has no
limit of its own.
"""

import mmap
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from flying_serving.errors import PeerMemory

ANNOUNCED_S = 60.0
"""Seconds to wait for a file that a peer announces."""
T = TypeVar("T")


class Address(msgspec.Struct, frozen=True, tag=True):
    """The place where memory can be opened: a file descriptor of a process, and its size."""

    pid: int
    descriptor: int
    size_bytes: int


class PagedMemory(Protocol):
    """Memory of `size_bytes` whose addresses stay while its pages of `page_bytes` come and go.

    `backs_on_use`: True if a page is there from its first use on, without a call of `back`.
    """

    @property
    def size_bytes(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def backs_on_use(self) -> bool: ...
    def back(self, first_byte: int, size_bytes: int) -> None:
        """Let there be pages for a range, which may then be used; the contents of new pages are
        undefined.
        """

    def release(self, first_byte: int, size_bytes: int) -> int:
        """Give pages that lie in a range back. Returns their bytes.

        A page that is shared with bytes outside the range stays. So may pages that were backed
        at once with pages outside the range.
        """


class Arena:
    """Memory of this process, zeros at first, that processes which know its `address` can map: a
    `PagedMemory`.

    `bytes` is the mapping.
    """

    page_bytes = mmap.PAGESIZE
    backs_on_use = True

    def __init__(self, name: str, size_bytes: int) -> None:
        self._file = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self._file, size_bytes)
        self.bytes = mmap.mmap(self._file, size_bytes)
        with suppress(OSError):  # as far as the system has them, and allows them for shared memory
            self.bytes.madvise(mmap.MADV_HUGEPAGE)
        self.size_bytes = size_bytes
        self.address = Address(os.getpid(), self._file, size_bytes)

    def back(self, first_byte: int, size_bytes: int) -> None:
        """Do nothing: the system backs a page when it is first used. See `PagedMemory`."""

    def release(self, first_byte: int, size_bytes: int) -> int:
        """Give pages back to the system, for all who map them; they read as zeros then. See
        `PagedMemory`.
        """
        pages = pages_inside(first_byte, size_bytes, mmap.PAGESIZE)
        released_bytes = len(pages) * mmap.PAGESIZE
        if pages:
            self.bytes.madvise(mmap.MADV_REMOVE, pages.start * mmap.PAGESIZE, released_bytes)
        return released_bytes


def pages_inside(first_byte: int, size_bytes: int, page_bytes: int) -> range:
    """Return the numbers of the whole pages in a range of bytes."""
    return range(-(-first_byte // page_bytes), (first_byte + size_bytes) // page_bytes)


def pages_touched(first_byte: int, size_bytes: int, page_bytes: int) -> range:
    """Return the numbers of the pages that hold bytes of a range."""
    if not size_bytes:
        return range(0)
    return range(first_byte // page_bytes, -(-(first_byte + size_bytes) // page_bytes))


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
            f"{whose}: {path} cannot be opened ({error.strerror}); all processes of a server "
            "must see each other "
            "and belong to one user"
        ) from None
    try:
        return mmap.mmap(file, address.size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(file)


def announced(path: str, kind: type[T], whose: str) -> T:
    """Return the contents of a file that a peer announces. Waits for a peer that has not come to
    the end of its start.

    Raises:
        PeerMemory: if it has not come in ANNOUNCED_S.
    """
    until_s = time.monotonic() + ANNOUNCED_S
    while not Path(path).exists():
        if time.monotonic() > until_s:
            raise PeerMemory(f"{whose}: not announced in {path} for {ANNOUNCED_S:g} s")
        time.sleep(0.01)
    return msgspec.json.decode(Path(path).read_bytes(), type=kind)


def announce(path: str, what: msgspec.Struct) -> None:
    """Write a file so that peers find it whole or not at all."""
    hidden = Path(f"{path}.new")
    hidden.write_bytes(msgspec.json.encode(what))
    hidden.rename(path)
