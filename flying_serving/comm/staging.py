"""Host memory between the memory of a device and shared memory."""

import torch


class HostStage:
    """Host memory through which the tensors of one device go out and come back. It grows as needed.

    Each copy is over when its call returns. For CUDA the memory is pinned. Tensors of the CPU are
    copied like those of any device.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def copy_out(self, x: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of `x` in host memory. The next call overwrites the copy."""
        if self._memory.numel() < x.nbytes:
            # a tensor made in inference mode could be written to in that mode only
            with torch.inference_mode(False):
                self._memory = torch.empty(
                    x.nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pinned
                )
        return self._memory[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
