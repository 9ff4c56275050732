"""What Triton and vLLM ask of a backend's driver: the CPU is one device, with one stream."""

from collections.abc import Callable
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CPUDriver(DriverBase):
    """The driver of the CPU, which launches nothing: Triton's interpreter runs kernels."""

    def __init__(self) -> None:
        """Skip Triton's own, which asks for a driver of a GPU."""

    @staticmethod
    def is_active() -> bool:
        """Return True: there is a CPU."""
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Return the name of a type as it is."""
        return ty

    def get_current_target(self) -> GPUTarget:
        """Return the CPU as a target."""
        return GPUTarget("cpu", 0, 0)

    def get_active_torch_device(self) -> torch.device:
        """Return torch's CPU."""
        return torch.device("cpu")

    def get_current_device(self) -> int:
        """Return the number of the one device."""
        return 0

    def set_current_device(self, device: int) -> None:
        """Keep the one device."""

    def get_current_stream(self, device: int | None = None) -> int:
        """Return the number of the one stream."""
        return 0

    def get_benchmarker(self) -> Callable[..., Any]:
        """Raise RuntimeError: times of interpreted kernels mean nothing."""
        raise RuntimeError("the Triton backend `cpu` measures nothing")
