"""The communicator pool (paper): every aligned group's communicator, built and warmed once, at
start.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flying_serving.comm.communicator import GroupEnd
from flying_serving.comm.group_files import group_file, whole_groups
from flying_serving.comm.shm import ShmGroup
from flying_serving.config import Deployment
from flying_serving.layout.groups import Group, Layout, aligned_group, group_world_ranks

Coordinator = Any  # vllm.distributed.parallel_state.GroupCoordinator
MakeCoordinators = Callable[[list[list[int]], str], Coordinator]
Activate = Callable[[Coordinator], AbstractContextManager[None]]
OpenEnd = Callable[[str, int, Group, Sequence[str]], GroupEnd]
"""A function that opens an end: of a file, for a rank of a group of engines, with the names of all
ranks.
"""
START_TIMEOUT_S = 600
"""Seconds that a worker waits at its start for the workers of the other engines."""


@dataclass
class Exchange:
    """Some devices of a group of engines, which exchange tensors.

    `device`: of each engine; None: all devices. `end`: where they have no torch world in common,
    while all engines are there.
    """

    coordinator: Coordinator
    device: int | None
    end: GroupEnd | None = None


class CommunicatorPool:
    """One coordinator per group size for this worker; only `activate` changes the active one.

    Where engines have several devices, each of these has one more in a group, for what it exchanges
    with the same device of the other engines.

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
        self._exchanges: dict[int, list[Exchange]] = {}
        for size in sizes:
            ranks = [
                group_world_ranks(g, devices, engines) for g in Layout.uniform(engines, size).groups
            ]
            self._exchanges[size] = [Exchange(make(ranks, f"lane{size}"), None)]
            if size > 1 and devices > 1:
                apart = [
                    of_group[d * size : (d + 1) * size]
                    for of_group in ranks
                    for d in range(devices)
                ]
                self._exchanges[size].append(Exchange(make(apart, f"tokens{size}"), device))
        self._engine, self._device, self._engines, self._devices = engine, device, engines, devices
        self._open_end: OpenEnd | None = None
        self.members: dict[int, Sequence[int]] = {}
        """The incarnations of the members of each group that is whole, by its size."""

    def coordinators(self, size: int) -> list[Coordinator]:
        """Return the coordinators through which this worker exchanges in its group of `size`
        engines.
        """
        return [exchange.coordinator for exchange in self._exchanges[size]]

    @property
    def sizes(self) -> list[int]:
        """The group sizes."""
        return list(self._exchanges)

    def coordinator(self, size: int) -> Coordinator:
        """Return the coordinator of this worker's group of `size` engines."""
        return self._exchanges[size][0].coordinator

    def same_device(self, size: int) -> Coordinator:
        """Return the coordinator of this worker's device in each of the `size` engines of its
        group, in their order.
        """
        return self._exchanges[size][-1].coordinator

    def _opened(self) -> Iterator[GroupEnd]:
        for exchanges in self._exchanges.values():
            for exchange in exchanges:
                if exchange.end is not None:
                    yield exchange.end

    def use_shared_memory(self, directory: str, deadline_s: float) -> None:
        """Let every group of more than one rank exchange through shared memory, once it is opened.

        The groups' files go to `directory`, on a memory file system. A rank waits `deadline_s` for
        the others.
        """

        def open_end(path: str, rank: int, group: Group, names: Sequence[str]) -> GroupEnd:
            return ShmGroup(path, rank, len(names), deadline_s=deadline_s, names=names)

        self.use_ends(directory, open_end)

    def use_ends(self, directory: str, open_end: OpenEnd) -> None:
        """Let every group of more than one rank exchange through an end that `open_end` opens.

        `make` has to build coordinators with one of `COMMUNICATORS`. `directory`: of the files in
        which the ranks of a group meet.
        """
        self._directory, self._open_end = directory, open_end

    def open(self, deployment: Deployment) -> None:
        """Attach to the files of the groups that are whole at this engine's start, as `reopen`."""
        for group, there in whole_groups(self._engine, self._exchanges, deployment.incarnations):
            self.reopen(len(group), there)

    def reopen(self, size: int, incarnations: Sequence[int]) -> None:
        """Attach to the files of the group of `size` engines whose members have these incarnations,
        in their order. There are none in a torch world.

        Every member has to do this, each once, as any incarnations have files of their own. The
        earlier files are left. Raises what the end's constructor does.
        """
        self.leave(size)
        self.members[size] = incarnations
        if self._open_end is None:
            return
        group = aligned_group(self._engine, size)
        for exchange in self._exchanges[size]:
            coordinator, device = exchange.coordinator, exchange.device
            if coordinator.world_size == 1:
                continue
            devices = range(self._devices) if device is None else [device]
            exchange.end = self._open_end(
                group_file(self._directory, group, incarnations, device),
                coordinator.rank_in_group,
                group,
                [f"engine {e} device {d}" for d in devices for e in group],
            )
            coordinator.device_communicator.use(exchange.end)

    def leave(self, size: int) -> None:
        """Leave the files of the group of `size` engines: a member is lost. Its collectives raise
        GroupBroken.

        The files are removed too: no process attaches to them any more, and their memory is free
        when all have left them.
        """
        self.members.pop(size, None)
        for exchange in self._exchanges[size]:
            end, exchange.end = exchange.end, None
            if end is not None:
                exchange.coordinator.device_communicator.use(None)
                end.close()
                Path(end.path).unlink(missing_ok=True)

    def require_whole(self, size: int, *, goes_on: bool = False) -> None:
        """Raise GroupBroken if a step of the group of `size` engines is void: a member was lost.

        To be called when the step is over. `goes_on`: True if a later one is launched already.
        """
        for exchange in self._exchanges[size]:
            if exchange.end is not None:
                exchange.end.require_whole(goes_on=goes_on)

    def warm(self) -> None:
        """Run one collective in each group, with all workers, as soon as the last one has come this
        far.
        """
        for end in self._opened():
            end.barrier(START_TIMEOUT_S)
        for size, exchanges in self._exchanges.items():
            for exchange in exchanges:
                if exchange.coordinator.world_size > 1:
                    self._any_of(size, exchange.coordinator, False)

    def any_of(self, size: int, value: bool) -> bool:
        """Return whether `value` is true on any member of the group of `size` engines. All return
        at the same time.
        """
        coordinator = self.coordinator(size)
        return value if coordinator.world_size == 1 else self._any_of(size, coordinator, value)

    def _any_of(self, size: int, coordinator: Coordinator, value: bool) -> bool:
        with self._activate(coordinator):
            votes = coordinator.all_reduce(torch.tensor([float(value)], device=coordinator.device))
            result = bool(votes.item() > 0)
        self.require_whole(size)
        return result

    def activate(self, size: int) -> AbstractContextManager[None]:
        """Make the group of `size` engines the tensor-parallel group while the body runs."""
        return self._activate(self.coordinator(size))

    def close(self) -> None:
        """Close the groups, and unmap their memory."""
        for end in self._opened():
            end.close()
