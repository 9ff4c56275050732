"""Memory of a CUDA device whose addresses stay while its pages come and go. Never run on CUDA, nor used until it was.

The calls are those of *Virtual Memory Management* in CUDA's driver API: a range of addresses is reserved, memory is
created page by page and mapped into it. Tests run them against a fake driver. See docs/cuda.md.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from flying_serving.errors import DeviceMemory, IntegrityError
from flying_serving.memory.arena import pages_inside


class Driver(Protocol):
    """What is used of `cuda.bindings.driver`, NVIDIA's binding, which vLLM 0.32.0 requires on CUDA.

    Each call returns its code (`CUresult`), then its result if it has one. What the calls take is named there.
    """

    CUresult: Any
    CUmemAllocationProp: Any
    CUmemAllocationType: Any
    CUmemAllocationHandleType: Any
    CUmemAllocationGranularity_flags: Any
    CUmemLocationType: Any
    CUmemAccessDesc: Any
    CUmemAccess_flags: Any

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        """Wait for what the device has been given to do."""

    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> tuple[Any, ...]:
        """Bytes of a page."""

    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> tuple[Any, ...]:
        """The first of so many addresses without memory."""

    def cuMemAddressFree(self, ptr: int, size: int) -> tuple[Any, ...]:
        """Addresses that were reserved, without memory, are free."""

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> tuple[Any, ...]:
        """A handle of memory without an address."""

    def cuMemRelease(self, handle: Any) -> tuple[Any, ...]:
        """Memory that is not mapped is free."""

    def cuMemMap(self, ptr: int, size: int, offset: int, handle: Any, flags: int) -> tuple[Any, ...]:
        """Memory is at an address; nobody may use it there yet."""

    def cuMemSetAccess(self, ptr: int, size: int, desc: list[Any], count: int) -> tuple[Any, ...]:
        """Some devices may use what is mapped at an address."""

    def cuMemUnmap(self, ptr: int, size: int) -> tuple[Any, ...]:
        """Memory is at its address no longer; both stay."""

    def cuMemExportToShareableHandle(self, handle: Any, handleType: Any, flags: int) -> tuple[Any, ...]:
        """A file descriptor with which other processes can map memory."""


def cuda_driver() -> Driver:
    """NVIDIA's binding of the driver. Raises DeviceMemory if it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceMemory(f"cuda.bindings.driver cannot be imported ({error}); vLLM for CUDA requires it") from None
    found: Driver = driver
    return found


class CudaArena:
    """Addresses for `size_bytes` of a device, rounded up to whole pages, none of them backed at first: a `PagedMemory`.

    `address` is the first one, `page_bytes` the least that the device maps (2 MiB). The device's context has to be the
    present one of the thread in all calls; all of them raise DeviceMemory if the driver refuses one of its own.
    """

    def __init__(self, driver: Driver, device: int, size_bytes: int) -> None:
        self._driver = driver
        self._prop = driver.CUmemAllocationProp()
        self._prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._prop.location.id = device
        self._prop.requestedHandleTypes = self._descriptors
        self._handles: dict[int, Any] = {}
        self.page_bytes, self.size_bytes = 0, size_bytes
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.page_bytes = int(self._call(driver.cuMemGetAllocationGranularity, self._prop, least))
        self.size_bytes = -(-size_bytes // self.page_bytes) * self.page_bytes
        self.address = int(self._call(driver.cuMemAddressReserve, self.size_bytes, self.page_bytes, 0, 0))

    @property
    def backed_bytes(self) -> int:
        """Of the pages that there are."""
        return len(self._handles) * self.page_bytes

    def back(self, first_byte: int, size_bytes: int) -> None:
        """See `PagedMemory`: each page that a byte of the range is in; none of them if the driver refuses one."""
        self._require_inside(first_byte, size_bytes)
        stop = -(-(first_byte + size_bytes) // self.page_bytes) if size_bytes else 0
        with ExitStack() as undo:
            for page in range(first_byte // self.page_bytes, stop):
                if page not in self._handles:
                    self._map(page)
                    undo.callback(self._unmap, page)
            undo.pop_all()

    def release(self, first_byte: int, size_bytes: int) -> int:
        """See `PagedMemory`: no step may use the range; steps that are under way are waited for."""
        self._require_inside(first_byte, size_bytes)
        pages = [page for page in pages_inside(first_byte, size_bytes, self.page_bytes) if page in self._handles]
        if pages:
            self._call(self._driver.cuCtxSynchronize)
        for page in pages:
            self._unmap(page)
        return len(pages) * self.page_bytes

    def share(self) -> dict[int, int]:
        """A file descriptor of each page that there is, by its number, for other processes; the caller closes them."""
        shared: dict[int, int] = {}
        with ExitStack() as undo:
            for page, handle in self._handles.items():
                call = self._driver.cuMemExportToShareableHandle
                shared[page] = int(self._call(call, handle, self._descriptors, 0))
                undo.callback(os.close, shared[page])
            undo.pop_all()
        return shared

    def close(self) -> None:
        """Free all of it, once. The first refusal of the driver is raised when the rest was tried."""
        with ExitStack() as steps:  # the last one that is named is the first one that is made
            steps.callback(self._call, self._driver.cuMemAddressFree, self.address, self.size_bytes)
            for page in self._handles:
                steps.callback(self._unmap, page)
            steps.callback(self._call, self._driver.cuCtxSynchronize)

    @property
    def _descriptors(self) -> Any:
        return self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _require_inside(self, first_byte: int, size_bytes: int) -> None:
        if not 0 <= first_byte <= first_byte + size_bytes <= self.size_bytes:
            raise IntegrityError(f"{size_bytes} bytes from {first_byte} on are not in an arena of {self.size_bytes}")

    def _map(self, page: int) -> None:
        """Create a page and map it: both, or neither."""
        driver, size_bytes = self._driver, self.page_bytes
        address = self.address + page * size_bytes
        access = driver.CUmemAccessDesc()
        access.location = self._prop.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with ExitStack() as undo:
            handle = self._call(driver.cuMemCreate, size_bytes, self._prop, 0)
            undo.callback(self._call, driver.cuMemRelease, handle)
            self._call(driver.cuMemMap, address, size_bytes, 0, handle, 0)
            undo.callback(self._call, driver.cuMemUnmap, address, size_bytes)
            self._call(driver.cuMemSetAccess, address, size_bytes, [access], 1)
            undo.pop_all()
        self._handles[page] = handle

    def _unmap(self, page: int) -> None:
        self._call(self._driver.cuMemUnmap, self.address + page * self.page_bytes, self.page_bytes)
        self._call(self._driver.cuMemRelease, self._handles.pop(page))

    def _call(self, call: Callable[..., tuple[Any, ...]], *args: Any) -> Any:
        """The result of a call, None if it has none. Raises DeviceMemory if its code is not success."""
        code, *results = call(*args)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceMemory(
                f"{call.__name__}: {code.name} ({int(code)}); device {self._prop.location.id} has {self.backed_bytes} "
                f"of {self.size_bytes} bytes, in pages of {self.page_bytes}"
            )
        return results[0] if results else None
