"""The communicators that vLLM's coordinator of a group uses when the group needs no torch world."""

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from flying_serving.errors import GroupBroken


class GroupEnd(Protocol):
    """One rank's end of the exchange of a group, whose members have certain incarnations.

    `path`: the file in which the ranks meet, of this exchange alone.
    """

    path: str

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks in place and return it."""

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the ranks' tensors, concatenated along `dim`."""

    def gather(self, x: torch.Tensor, dst: int, dim: int = -1) -> torch.Tensor | None:
        """Return the result of `all_gather` on rank `dst`; None on the others."""

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrite `x` with rank `src`'s tensor; return it."""

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of each rank's tensor, which has shape (world, ...)."""

    def barrier(self, deadline_s: float) -> None:
        """Return once every rank has called this, within `deadline_s`."""

    def require_whole(self, *, goes_on: bool = False) -> None:
        """Raise GroupBroken if results of a step that is over are void, because a rank was lost.

        `goes_on`: True if collectives of a later step are queued.
        """

    def close(self) -> None:
        """Leave the group. A second call does nothing."""


class GroupCommunicator:
    """Collectives of a group, over an end that is replaced when members were started again.

    Each method takes, returns and raises as the same method of the end. It raises GroupBroken while
    the group has no end. `name`: the group's, for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._group: GroupEnd | None = None

    def use(self, group: GroupEnd | None) -> None:
        """Use this group from now on; with None collectives raise GroupBroken."""
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks in place."""
        return self._opened("all_reduce").all_reduce(x)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the ranks' tensors, concatenated along `dim`."""
        return self._opened("all_gather").all_gather(x, dim)

    def gather(self, x: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Return the result of `all_gather` on rank `dst`; None on the others."""
        return self._opened("gather").gather(x, dst, dim)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite `x` with that of rank `src`."""
        return self._opened("broadcast").broadcast(x, src)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of each rank's tensor, which has shape (world, ...)."""
        return self._opened("all_to_all").all_to_all(x)

    def _opened(self, operation: str) -> GroupEnd:
        if self._group is None:
            raise GroupBroken(f"{operation}: {self.name} is not whole")
        return self._group


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


class StagedCommunicator(GroupCommunicator):
    """Collectives in shared memory, for tensors of a device.

    Each tensor is copied to host memory, and the result back. A collective is over when its call
    returns, and its result has the same bits as on the CPU. Calls from several threads take turns.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__(name)
        self._stage = HostStage(device)
        self._lock = threading.Lock()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks in place."""
        with self._lock:
            return x.copy_(super().all_reduce(self._stage.copy_out(x)))

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return the ranks' tensors, concatenated along `dim`."""
        with self._lock:
            return super().all_gather(self._stage.copy_out(x), dim).to(x.device)

    def gather(self, x: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        """Return the result of `all_gather` on rank `dst`; None on the others."""
        with self._lock:
            gathered = super().gather(self._stage.copy_out(x), dst, dim)
            return None if gathered is None else gathered.to(x.device)

    def broadcast(self, x: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite `x` with that of rank `src`."""
        with self._lock:
            return x.copy_(super().broadcast(self._stage.copy_out(x), src))

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of each rank's tensor, which has shape (world, ...)."""
        with self._lock:
            return super().all_to_all(self._stage.copy_out(x)).to(x.device)


def _direct(name: str, _device: torch.device) -> GroupCommunicator:
    return GroupCommunicator(name)


def _shm(name: str, device: torch.device) -> GroupCommunicator:
    if device.type != "cpu":
        raise ValueError(f"{name}: shared memory without staging takes no tensors of {device}")
    return GroupCommunicator(name)


COMMUNICATORS: Mapping[str, Callable[[str, torch.device], GroupCommunicator]] = {
    "shm": _shm,
    "staged": StagedCommunicator,
    "pynccl": _direct,
}
"""The communicators without a torch world, by their names in `Deployment.collectives`. Each is made
from the name of its group, for errors, and the device of its tensors.
"""
