"""The communicator that vLLM's coordinator of a group uses when the group is in shared memory."""

import torch

from flying_serving.comm.shm import ShmGroup
from flying_serving.errors import EngineLost


class ShmCommunicator:
    """Collectives of a group, over a `ShmGroup` that is replaced when members were started again.

    Each method takes, returns and raises as the same method of `ShmGroup`. It raises EngineLost
    while the group has no shared memory. `name`: the group's, for errors.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._group: ShmGroup | None = None

    def use(self, group: ShmGroup | None) -> None:
        """Use this group from now on; with None collectives raise EngineLost."""
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

    def _opened(self, operation: str) -> ShmGroup:
        if self._group is None:
            raise EngineLost(f"{operation}: {self.name} is not whole")
        return self._group
