"""Empty the parts of a library's GPU code that one architecture does not run.

nvcc puts the code of a source file into a container, one entry for each architecture: machine code
(cubin), or PTX, which the driver compiles where there is no machine code for its GPU. The driver
chooses an entry by its header and reads no other. So the bytes of the others become zeros, which
compress to nothing, and no offset in the library changes.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_CONTAINER = struct.Struct("<IHHQ")
"""A magic number, the version, the bytes of this header, and those of all entries."""
_BEGINS = struct.pack("<IHH", 0xBA55ED50, 1, _CONTAINER.size)
_ENTRY = struct.Struct("<HHIQIIHHI")
"""The kind, a version, the bytes of the header and of the code, four more, the architecture."""
_PTX, _CUBIN = 1, 2


@dataclass(frozen=True)
class Entry:
    """Code for one architecture: 90 is that of an H100. `code`: its bytes in the library."""

    kind: int
    architecture: int
    code: slice


def containers(library: bytes | bytearray) -> Iterator[list[Entry]]:
    """Return the entries of each container of a library.

    Raises:
        ValueError: if a container does not consist of whole entries.
    """
    at = library.find(_BEGINS)
    while at >= 0:
        *_, size = _CONTAINER.unpack_from(library, at)
        at += _CONTAINER.size
        end, entries = at + size, list[Entry]()
        while at < end <= len(library):
            kind, _, header_bytes, code_bytes, *_, architecture = _ENTRY.unpack_from(library, at)
            begins = at + header_bytes
            at = begins + code_bytes
            entries.append(Entry(kind, architecture, slice(begins, at)))
        if at != end:
            raise ValueError(f"a container of GPU code ends at byte {end}, and an entry at {at}")
        yield entries
        at = library.find(_BEGINS, end)


def empty_others(library: bytearray, architecture: int) -> int:
    """Empty the entries that a GPU of an architecture does not run. Returns how many bytes.

    A container without machine code for it keeps its PTX for this and older architectures.

    Raises:
        ValueError: if a container cannot be read.
    """
    emptied_bytes = 0
    for entries in containers(library):
        compiled = any(one.kind == _CUBIN and one.architecture == architecture for one in entries)
        for one in entries:
            if compiled:
                needed = one.kind == _CUBIN and one.architecture == architecture
            else:
                needed = one.kind == _PTX and one.architecture <= architecture
            if not needed:
                size = one.code.stop - one.code.start
                library[one.code] = bytes(size)
                emptied_bytes += size
    return emptied_bytes
