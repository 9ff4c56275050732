"""CUDA's driver as far as `memory/cuda_arena.py` uses it, in Python: it asserts what the real one requires."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from os import memfd_create
from types import SimpleNamespace
from typing import Any

PAGE = 2 << 20
FIRST_ADDRESS = 7 * PAGE


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

    `created`: handles of memory. `mapped`: handles by address, `usable` the addresses that may be used. `calls`: names
    of all calls. `refuses`: a call that fails, and how many of that name succeed before.
    """

    device: int = 0
    pages: int = 100
    reserved: dict[int, int] = field(default_factory=dict)
    created: set[int] = field(default_factory=set)
    mapped: dict[int, int] = field(default_factory=dict)
    usable: set[int] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    refuses: tuple[str, int] | None = None
    idle: bool = False
    """Whether nothing has been given to the device since it was waited for."""

    CUresult = Result
    CUmemAllocationType = CUmemAllocationHandleType = CUmemAllocationGranularity_flags = Kind
    CUmemLocationType = CUmemAccess_flags = Kind

    @staticmethod
    def CUmemAllocationProp() -> Any:
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None), requestedHandleTypes=None)

    @staticmethod
    def CUmemAccessDesc() -> Any:
        return SimpleNamespace(location=None, flags=None)

    @property
    def leaves_nothing(self) -> bool:
        """Whether all is as before."""
        return not (self.reserved or self.created or self.mapped or self.usable)

    @contextmanager
    def refusing(self, call: str, after: int = 0) -> Iterator[None]:
        """While the body runs, a call fails as if there were no memory, when some of them have succeeded."""
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
        assert (size % PAGE, alignment % PAGE, addr, flags) == (0, 0, 0, 0)
        self.reserved[FIRST_ADDRESS] = size
        return Result.CUDA_SUCCESS, FIRST_ADDRESS

    def cuMemAddressFree(self, ptr: int, size: int) -> Answer:
        if self._refused("cuMemAddressFree"):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        assert not self.mapped, "addresses are freed while memory is mapped there"
        assert self.reserved.pop(ptr) == size
        return (Result.CUDA_SUCCESS,)

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> Answer:
        if self._refused("cuMemCreate") or len(self.created) == self.pages:
            return (Result.CUDA_ERROR_OUT_OF_MEMORY, 0)
        self._require_prop(prop)
        assert (size, flags) == (PAGE, 0)
        handle = 1000 + len(self.calls)
        self.created.add(handle)
        return Result.CUDA_SUCCESS, handle

    def cuMemRelease(self, handle: int) -> Answer:
        if self._refused("cuMemRelease"):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        assert handle not in self.mapped.values(), "memory is released while it is mapped"
        self.created.remove(handle)
        return (Result.CUDA_SUCCESS,)

    def cuMemMap(self, ptr: int, size: int, offset: int, handle: int, flags: int) -> Answer:
        if self._refused("cuMemMap"):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        assert (size, offset, flags, ptr % PAGE) == (PAGE, 0, 0, 0)
        assert handle in self.created, "memory is mapped that was not created"
        assert handle not in self.mapped.values()
        assert ptr not in self.mapped
        assert any(first <= ptr < first + reserved for first, reserved in self.reserved.items())
        self.mapped[ptr] = handle
        return (Result.CUDA_SUCCESS,)

    def cuMemSetAccess(self, ptr: int, size: int, desc: list[Any], count: int) -> Answer:
        if self._refused("cuMemSetAccess"):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        assert ptr in self.mapped
        assert (size, count, len(desc)) == (PAGE, 1, 1)
        assert (desc[0].location.id, desc[0].location.type) == (self.device, Kind.CU_MEM_LOCATION_TYPE_DEVICE)
        assert desc[0].flags is Kind.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.usable.add(ptr)
        self.idle = False  # somebody uses it from now on
        return (Result.CUDA_SUCCESS,)

    def cuMemUnmap(self, ptr: int, size: int) -> Answer:
        if self._refused("cuMemUnmap"):
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        assert size == PAGE
        self.mapped.pop(ptr)
        self.usable.discard(ptr)
        return (Result.CUDA_SUCCESS,)

    def cuMemExportToShareableHandle(self, handle: int, handleType: Kind, flags: int) -> Answer:
        if self._refused("cuMemExportToShareableHandle"):
            return (Result.CUDA_ERROR_INVALID_VALUE, None)
        assert (handleType, flags) == (Kind.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
        assert handle in self.created
        return Result.CUDA_SUCCESS, memfd_create(f"handle-{handle}")

    def _require_prop(self, prop: Any) -> None:
        assert prop.type is Kind.CU_MEM_ALLOCATION_TYPE_PINNED
        assert (prop.location.type, prop.location.id) == (Kind.CU_MEM_LOCATION_TYPE_DEVICE, self.device)
        assert prop.requestedHandleTypes is Kind.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
