"""Memory of a CUDA device by *Virtual Memory Management* of CUDA's driver: addresses are reserved,
and memory is created and mapped there. Not run on CUDA in this version: see docs/design/cuda.md.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from flying_serving.errors import DeviceMemory


class Driver(Protocol):
    """The part of `cuda.bindings.driver` that is used: NVIDIA's binding, which vLLM 0.32.0 requires
    on CUDA.

    Each call returns its code (`CUresult`), then its result if it has one. Arguments have the
    names that the binding gives them.
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
        """Wait for all work of the present context."""

    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> tuple[Any, ...]:
        """Return the bytes of a page."""

    def cuMemAddressReserve(
        self, size: int, alignment: int, addr: int, flags: int
    ) -> tuple[Any, ...]:
        """Reserve `size` addresses without memory, and return the first."""

    def cuMemAddressFree(self, ptr: int, size: int) -> tuple[Any, ...]:
        """Free reserved addresses at which nothing is mapped."""

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> tuple[Any, ...]:
        """Return a handle of memory without an address."""

    def cuMemRelease(self, handle: Any) -> tuple[Any, ...]:
        """Release a handle. The memory is free when no process has a handle or maps it."""

    def cuMemMap(
        self, ptr: int, size: int, offset: int, handle: Any, flags: int
    ) -> tuple[Any, ...]:
        """Map memory at an address, where no device may use it yet."""

    def cuMemSetAccess(self, ptr: int, size: int, desc: list[Any], count: int) -> tuple[Any, ...]:
        """Let devices use the memory that is mapped at an address."""

    def cuMemUnmap(self, ptr: int, size: int) -> tuple[Any, ...]:
        """Unmap memory: all of a mapping, never a part."""

    def cuMemExportToShareableHandle(
        self, handle: Any, handleType: Any, flags: int
    ) -> tuple[Any, ...]:
        """Return a file descriptor with which other processes can map memory."""

    def cuMemImportFromShareableHandle(self, osHandle: int, shHandleType: Any) -> tuple[Any, ...]:
        """Return a handle of memory of another process, from its file descriptor."""


class DeviceBytes:
    """Bytes of a device at an address, in CUDA's array interface.

    `owner`: is kept while a tensor over the bytes exists.
    """

    def __init__(self, address: int, size_bytes: int, owner: object) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.owner = owner
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (size_bytes,),
            "typestr": "|i1",
            "version": 3,
        }


def cuda_tensor(memory: DeviceBytes) -> torch.Tensor:
    """Return an int8 tensor over bytes of a CUDA device, of which the first has memory.

    Raises:
        DeviceMemory: if torch has copied them.
    """
    # without `device`: torch asks the driver which one it is
    tensor = torch.as_tensor(memory)
    if tensor.data_ptr() != memory.address:
        raise DeviceMemory(f"torch has copied {memory.size_bytes} bytes at {memory.address:#x}")
    return tensor


def cuda_driver() -> Driver:
    """Return NVIDIA's binding of the driver. Raises DeviceMemory if it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceMemory(
            f"cuda.bindings.driver cannot be imported ({error}); vLLM for CUDA requires it"
        ) from None
    binding: Driver = driver
    return binding


class CudaDevice:
    """The device `number` of a process, whose context has to be the present one of the thread.

    `page_bytes`: the smallest piece of memory that can be mapped (2 MiB). `tensor_of`: makes a
    tensor over bytes of the device.

    Raises:
        DeviceMemory: in every method, if the driver refuses a call.
    """

    def __init__(
        self,
        driver: Driver,
        number: int,
        tensor_of: Callable[[DeviceBytes], torch.Tensor] = cuda_tensor,
    ) -> None:
        self._driver = driver
        self._tensor_of = tensor_of
        self.number = number
        self._properties = self._properties_of_memory()
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.page_bytes = int(
            self._call(driver.cuMemGetAllocationGranularity, self._properties, least)
        )

    def whole_pages_bytes(self, size_bytes: int) -> int:
        """Return the bytes of the fewest pages that hold `size_bytes`."""
        return -(-size_bytes // self.page_bytes) * self.page_bytes

    def reserve(self, size_bytes: int) -> int:
        """Reserve addresses for whole pages. Return the first address."""
        return int(self._call(self._driver.cuMemAddressReserve, size_bytes, self.page_bytes, 0, 0))

    def free_addresses(self, address: int, size_bytes: int) -> None:
        """Free reserved addresses at which nothing is mapped."""
        self._call(self._driver.cuMemAddressFree, address, size_bytes)

    def create(self, size_bytes: int) -> Any:
        """Create memory for whole pages that other processes can map. Return its handle."""
        return self._call(self._driver.cuMemCreate, size_bytes, self._properties, 0)

    def map(self, address: int, size_bytes: int, handle: Any) -> None:
        """Map memory for this device. The handle is released if that fails."""
        driver = self._driver
        access = driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with ExitStack() as undo:
            undo.callback(self.release, handle)
            self._call(driver.cuMemMap, address, size_bytes, 0, handle, 0)
            undo.callback(self._call, driver.cuMemUnmap, address, size_bytes)
            self._call(driver.cuMemSetAccess, address, size_bytes, [access], 1)
            undo.pop_all()

    def unmap(self, address: int, size_bytes: int, handle: Any) -> None:
        """Unmap memory, all of a mapping, and release its handle. No step may use it any more."""
        self._call(self._driver.cuMemUnmap, address, size_bytes)
        self.release(handle)

    def release(self, handle: Any) -> None:
        """Release a handle of memory."""
        self._call(self._driver.cuMemRelease, handle)

    def synchronize(self) -> None:
        """Wait for all work of this process on the device."""
        self._call(self._driver.cuCtxSynchronize)

    def export(self, handle: Any) -> int:
        """Return a file descriptor of memory, which the caller closes."""
        call = self._driver.cuMemExportToShareableHandle
        return int(self._call(call, handle, self._descriptors, 0))

    def import_from(self, descriptor: int) -> Any:
        """Return a handle of memory of another process."""
        call = self._driver.cuMemImportFromShareableHandle
        return self._call(call, descriptor, self._descriptors)

    def tensor(self, address: int, size_bytes: int, owner: object) -> torch.Tensor:
        """Return an int8 tensor over bytes of which the first has memory; it keeps `owner`."""
        return self._tensor_of(DeviceBytes(address, size_bytes, owner))

    def _properties_of_memory(self) -> Any:
        driver = self._driver
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.number
        properties.requestedHandleTypes = self._descriptors
        return properties

    @property
    def _descriptors(self) -> Any:
        return self._driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _call(self, call: Callable[..., tuple[Any, ...]], *args: Any) -> Any:
        """Return the result of a call, None if it has none."""
        code, *results = call(*args)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise DeviceMemory(
                f"{call.__name__}: {code.name} ({int(code)}) on device {self.number}"
            )
        return results[0] if results else None
