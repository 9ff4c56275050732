"""The communicator pool (paper): every aligned group's communicator, built and warmed once, at
start.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any

import torch

from flying_serving.comm.communicator import GroupEnd
from flying_serving.comm.group_files import group_file
from flying_serving.comm.shm import ShmGroup
from flying_serving.layout.groups import Group, Layout, aligned_group, group_world_ranks

Coordinator = Any  # vllm.distributed.parallel_state.GroupCoordinator
MakeCoordinators = Callable[[list[list[int]], str], Coordinator]
Activate = Callable[[Coordinator], AbstractContextManager[None]]
SpreadOver = Callable[[Sequence[int], mmap], None]
"""A function that says where the memory of a group of engines, which has no pages yet, is to
lie.
"""
OpenEnd = Callable[[str, int, Group, Sequence[str]], GroupEnd]
"""A function that opens an end: of a file, for a rank of a group of engines, with the names of all
ranks.
"""
START_TIMEOUT_S = 600
"""Seconds that a worker waits at its start for the workers of the other engines."""


def _where_it_is_used(group: Sequence[int], memory: mmap) -> None:
    """Leave the choice to the system: a page is on the node of the process that needs it first."""


class CommunicatorPool:
    """One coordinator per group size for this worker; only `activate` changes the active one.

    Args:
        sizes: group sizes to build, 1 among them.
        make: builds the coordinators of a partition of all world ranks; every worker calls it in
            the same order.
        activate: context manager that makes a coordinator vLLM's tensor-parallel group.
    """

    def __init__(
        self,
        engine: int,
        device: int,
        *,
        engines: int,
        devices: int,
        sizes: Sequence[int],
        make: MakeCoordinators,
        activate: Activate,
    ) -> None:
        self._activate = activate
        self._coordinators: dict[int, Coordinator] = {}
        self._ends: dict[int, GroupEnd] = {}
        for size in sizes:
            partition = [
                group_world_ranks(g, devices, engines) for g in Layout.uniform(engines, size).groups
            ]
            self._coordinators[size] = make(partition, f"lane{size}")
        self._engine, self._device, self._engines, self._devices = engine, device, engines, devices

    def coordinator(self, size: int) -> Coordinator:
        """Return the coordinator of this worker's group of `size` engines."""
        return self._coordinators[size]

    def use_shared_memory(
        self, directory: str, deadline_s: float, spread: SpreadOver = _where_it_is_used
    ) -> None:
        """Let every group of more than one rank exchange through shared memory, once it is opened.

        The groups' files go to `directory`, on a memory file system. A rank waits `deadline_s` for
        the others. `spread` says where a group's memory is to lie.
        """

        def open_end(path: str, rank: int, group: Group, names: Sequence[str]) -> GroupEnd:
            return ShmGroup(
                path,
                rank,
                len(names),
                deadline_s=deadline_s,
                names=names,
                spread=partial(spread, group),
            )

        self.use_ends(directory, open_end)

    def use_ends(self, directory: str, open_end: OpenEnd) -> None:
        """Let every group of more than one rank exchange through an end that `open_end` opens.

        `make` has to build coordinators with one of `COMMUNICATORS`. `directory`: of the files in
        which the ranks of a group meet.
        """
        self._directory, self._open_end = directory, open_end

    def reopen(self, size: int, incarnations: Sequence[int]) -> None:
        """Attach to the file of the group of `size` engines whose members have these incarnations,
        in their order.

        Every member has to do this, each once, as any incarnations have a file of their own. The
        earlier file is left. Raises what the end's constructor does.
        """
        self.leave(size)
        coordinator = self._coordinators[size]
        if coordinator.world_size == 1:
            return
        group = aligned_group(self._engine, size)
        self._ends[size] = self._open_end(
            group_file(self._directory, group, incarnations),
            coordinator.rank_in_group,
            group,
            [f"engine {e} device {d}" for d in range(self._devices) for e in group],
        )
        coordinator.device_communicator.use(self._ends[size])

    def leave(self, size: int) -> None:
        """Leave the file of the group of `size` engines: a member is lost. Its collectives raise
        EngineLost.

        The file is removed too: no process attaches to it any more, and its memory is free when all
        have left it.
        """
        end = self._ends.pop(size, None)
        if end is not None:
            self._coordinators[size].device_communicator.use(None)
            end.close()
            Path(end.path).unlink(missing_ok=True)

    def require_whole(self, size: int, *, goes_on: bool = False) -> None:
        """Raise EngineLost if a step of the group of `size` engines is void: a member was lost.

        To be called when the step is over. `goes_on`: True if a later one is launched already.
        """
        if size in self._ends:
            self._ends[size].require_whole(goes_on=goes_on)

    def warm(self) -> None:
        """Run one collective in each group, with all workers, as soon as the last one has come this
        far.
        """
        for end in self._ends.values():
            end.barrier(START_TIMEOUT_S)
        for size, coordinator in self._coordinators.items():
            if coordinator.world_size > 1:
                self.any_of(size, False)

    def any_of(self, size: int, value: bool) -> bool:
        """Return whether `value` is true on any member of the group of `size` engines. All return
        at the same time.
        """
        coordinator = self._coordinators[size]
        if coordinator.world_size == 1:
            return value
        with self.activate(size):
            votes = coordinator.all_reduce(torch.tensor([float(value)], device=coordinator.device))
            result = bool(votes.item() > 0)
        self.require_whole(size)
        return result

    def activate(self, size: int) -> AbstractContextManager[None]:
        """Make the group of `size` engines the tensor-parallel group while the body runs."""
        return self._activate(self._coordinators[size])

    def close(self) -> None:
        """Close the groups, and unmap their memory."""
        for end in self._ends.values():
            end.close()
