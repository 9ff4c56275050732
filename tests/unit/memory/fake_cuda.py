"""CUDA's driver as far as `memory/cuda_device.py` uses it, over memory of the host: pages can be
written and read, and other processes can map them.

It asserts the rules of the real one. Memory that is not mapped cannot be used: a process that tries
ends.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any

import torch

from flying_serving.memory.cuda_device import CudaDevice, DeviceBytes

PAGE = 2 * mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE = 0, 0x10, 0x4000


class Result(IntEnum):
    """Codes of CUDA's driver, with its numbers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Kind(Enum):
    """Constants that calls take."""

    CU_MEM_ALLOCATION_TYPE_PINNED = 1
    CU_MEM_LOCATION_TYPE_DEVICE = 2
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 3
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 4
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 5


Answer = tuple[Any, ...]


@dataclass
class FakeDriver:
    """A device of `pages` pages.

    `created`: file and bytes of each handle. `imported`: handles of other processes' memory.
    `mapped`: handle and bytes by address; `usable`: the
    addresses that may be used. `calls`: names of all calls. `refuses`: a call that fails, and how
    many of that name succeed before. `idle`: True if the device was waited for since it got memory.
    """

    device: int = 0
    pages: int = 1000
    reserved: dict[int, int] = field(default_factory=dict)
    created: dict[int, tuple[int, int]] = field(default_factory=dict)
    imported: set[int] = field(default_factory=set)
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)
    usable: set[int] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    refuses: tuple[str, int] | None = None
    idle: bool = False

    CUresult = Result
    CUmemAllocationType = CUmemAllocationHandleType = CUmemAllocationGranularity_flags = Kind
    CUmemLocationType = CUmemAccess_flags = Kind

    @staticmethod
    def CUmemAllocationProp() -> Any:
        location = SimpleNamespace(type=None, id=None)
        return SimpleNamespace(type=None, location=location, requestedHandleTypes=None)

    @staticmethod
    def CUmemAccessDesc() -> Any:
        return SimpleNamespace(location=None, flags=None)

    @property
    def leaves_nothing(self) -> bool:
        """Return whether all is as before."""
        return not (self.reserved or self.created or self.mapped or self.usable)

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the memory that was created here."""
        created = self.created.items()
        return sum(size for handle, (_, size) in created if handle not in self.imported)

    @contextmanager
    def refusing(self, call: str, after: int = 0) -> Iterator[None]:
        """While the body runs, refuse a call once, after `after` of them have succeeded."""
        self.refuses = call, after
        yield
        self.refuses = None

    def _refused(self, name: str) -> bool:
        self.calls.append(name)
        if self.refuses is None or self.refuses[0] != name:
            return False
        left = self.refuses[1]
        self.refuses = None if left == 0 else (name, left - 1)
        return left == 0

    def cuCtxSynchronize(self) -> Answer:
        if self._refused("cuCtxSynchronize"):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        self.idle = True
        return (Result.CUDA_SUCCESS,)

    def cuMemGetAllocationGranularity(self, prop: Any, option: Kind) -> Answer:
        if self._refused("cuMemGetAllocationGranularity"):
            return (Result.CUDA_ERROR_INVALID_VALUE, 0)
        self._require_prop(prop)
        assert option is Kind.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return Result.CUDA_SUCCESS, PAGE

    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> Answer:
        if self._refused("cuMemAddressReserve"):
            return (Result.CUDA_ERROR_OUT_OF_MEMORY, 0)
        assert size > 0
        assert (size % PAGE, alignment, addr, flags) == (0, PAGE, 0, 0)
        whole = _mapping(None, size + PAGE, _PROT_NONE, -1)
        first = -(-whole // PAGE) * PAGE
        for start, stop in ((whole, first), (first + size, whole + size + PAGE)):
            if start < stop:
                assert _LIBC.munmap(start, stop - start) == 0
        self.reserved[first] = size
        return Result.CUDA_SUCCESS, first

    def cuMemAddressFree(self, ptr: int, size: int) -> Answer:
        if self._refused("cuMemAddressFree"):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        assert self.reserved.pop(ptr) == size
        inside = [address for address in self.mapped if ptr <= address < ptr + size]
        assert not inside, "addresses are freed while memory is mapped there"
        assert _LIBC.munmap(ptr, size) == 0
        return (Result.CUDA_SUCCESS,)

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> Answer:
        if self._refused("cuMemCreate") or self.used_bytes + size > self.pages * PAGE:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY, 0)
        self._require_prop(prop)
        assert (size > 0, size % PAGE, flags) == (True, 0, 0)
        file = os.memfd_create("fake-device")
        os.ftruncate(file, size)
        return Result.CUDA_SUCCESS, self._handle_of(file)

    def cuMemRelease(self, handle: int) -> Answer:
        if self._refused("cuMemRelease"):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        users = [address for address, (used, _) in self.mapped.items() if used == handle]
        assert not users, "memory is released while it is mapped"
        os.close(self.created.pop(handle)[0])
        self.imported.discard(handle)
        return (Result.CUDA_SUCCESS,)

    def cuMemMap(self, ptr: int, size: int, offset: int, handle: int, flags: int) -> Answer:
        if self._refused("cuMemMap"):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        assert (offset, flags, ptr % PAGE) == (0, 0, 0)
        assert self.created[handle][1] == size
        assert any(
            first <= ptr and ptr + size <= first + reserved
            for first, reserved in self.reserved.items()
        )
        assert all(
            ptr + size <= address or address + used <= ptr
            for address, (_, used) in self.mapped.items()
        ), "memory is mapped where there is some"
        _mapping(ptr, size, _PROT_NONE, self.created[handle][0])
        self.mapped[ptr] = handle, size
        return (Result.CUDA_SUCCESS,)

    def cuMemSetAccess(self, ptr: int, size: int, desc: list[Any], count: int) -> Answer:
        if self._refused("cuMemSetAccess"):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        assert self.mapped[ptr][1] == size
        assert (count, len(desc)) == (1, 1)
        place = desc[0].location
        assert (place.id, place.type) == (self.device, Kind.CU_MEM_LOCATION_TYPE_DEVICE)
        assert desc[0].flags is Kind.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        assert _LIBC.mprotect(ptr, size, mmap.PROT_READ | mmap.PROT_WRITE) == 0
        self.usable.add(ptr)
        self.idle = False
        return (Result.CUDA_SUCCESS,)

    def cuMemUnmap(self, ptr: int, size: int) -> Answer:
        if self._refused("cuMemUnmap"):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        assert self.mapped.pop(ptr)[1] == size, "a part of a mapping is unmapped"
        _mapping(ptr, size, _PROT_NONE, -1)
        self.usable.discard(ptr)
        return (Result.CUDA_SUCCESS,)

    def cuMemExportToShareableHandle(self, handle: int, handleType: Kind, flags: int) -> Answer:
        if self._refused("cuMemExportToShareableHandle"):
            return (Result.CUDA_ERROR_INVALID_VALUE, None)
        assert (handleType, flags) == (Kind.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
        return Result.CUDA_SUCCESS, os.dup(self.created[handle][0])

    def cuMemImportFromShareableHandle(self, osHandle: int, shHandleType: Kind) -> Answer:
        if self._refused("cuMemImportFromShareableHandle"):
            return (Result.CUDA_ERROR_INVALID_VALUE, None)
        assert shHandleType is Kind.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = self._handle_of(os.dup(osHandle))
        self.imported.add(handle)
        return Result.CUDA_SUCCESS, handle

    def _handle_of(self, file: int) -> int:
        handle = 1000 + len(self.calls)
        self.created[handle] = file, os.fstat(file).st_size
        return handle

    def _require_prop(self, prop: Any) -> None:
        assert prop.type is Kind.CU_MEM_ALLOCATION_TYPE_PINNED
        place = prop.location
        assert (place.type, place.id) == (Kind.CU_MEM_LOCATION_TYPE_DEVICE, self.device)
        assert prop.requestedHandleTypes is Kind.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _mapping(address: int | None, size: int, protection: int, file: int) -> int:
    """Map a file, or nothing, at an address or anywhere. Return the address."""
    flags = mmap.MAP_SHARED if file >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    flags |= _MAP_FIXED if address is not None else 0
    mapped = _LIBC.mmap(address, size, protection, flags, file, 0)
    assert mapped not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
    return int(mapped)


def host_tensor(memory: DeviceBytes) -> torch.Tensor:
    """Return a tensor of the CPU over memory of the fake device."""
    buffer = (ctypes.c_char * memory.size_bytes).from_address(memory.address)
    buffer.owner = memory.owner  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.int8)


def fake_device(driver: FakeDriver | None = None) -> CudaDevice:
    """Return a device whose memory is the host's."""
    driver = FakeDriver() if driver is None else driver
    return CudaDevice(driver, driver.device, host_tensor)
