"""Made-up GPU code of a library: containers as nvcc writes them."""

import struct

from supply.fatbin import Entry, containers

PTX, CUBIN = 1, 2
CODE = b"code of a kernel"


def container(*entries: tuple[int, int]) -> bytes:
    """Return a container with an entry for each kind and architecture."""
    whole = b"".join(
        struct.pack("<HHIQIIHHI", kind, 1, 64, len(CODE), len(CODE), 0, 0, 8, architecture).ljust(
            64
        )
        + CODE
        for kind, architecture in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(whole)) + whole


def entries_of(library: bytes | bytearray) -> list[Entry]:
    """Return the entries of all containers."""
    return [entry for entries in containers(library) for entry in entries]


def is_empty(library: bytes | bytearray, entry: Entry) -> bool:
    """Return whether an entry has no code left."""
    assert library[entry.code] in (CODE, bytes(len(CODE)))
    return library[entry.code] != CODE
