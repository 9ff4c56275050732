"""Ranks that are threads, and a broadcast among them in memory."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from flying_serving.layout.groups import Group, aligned_group

Broadcast = Callable[[torch.Tensor, int], torch.Tensor]
"""(tensor, rank it comes from) -> the tensor, which was overwritten on all other ranks."""
TIMEOUT_S = 60.0
T = TypeVar("T")


class Ranks:
    """Ranks of a number. One that makes other calls than the rest, or fewer, makes all fail.

    `sent`: from which rank each broadcast came, and the shape of what it sent.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.sent: list[tuple[int, tuple[int, ...]]] = []
        self._barrier = threading.Barrier(count, timeout=TIMEOUT_S)
        self._told: torch.Tensor | None = None

    def broadcast_of(self, rank: int) -> Broadcast:
        """The broadcast as this rank calls it."""

        def broadcast(values: torch.Tensor, src: int) -> torch.Tensor:
            if rank == src:
                self._told = values.clone()
                self.sent.append((src, tuple(values.shape)))
            self._barrier.wait()
            assert self._told is not None, f"no rank {src}"
            assert (values.shape, values.dtype) == (self._told.shape, self._told.dtype)
            values.copy_(self._told)
            if self._barrier.wait() == 0:
                self._told = None
            self._barrier.wait()
            return values

        return broadcast

    def wait(self) -> None:
        """Return when all ranks have come."""
        self._barrier.wait()

    def run(self, work: Callable[[int], T]) -> list[T]:
        """What each rank returns; the error of one ends all, and is raised."""

        def one(rank: int) -> T:
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.count) as pool:
            futures = [pool.submit(one, rank) for rank in range(self.count)]
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


class Communicators:
    """A worker's, of all its groups; in each, ranks are ordered by device, then engine."""

    def __init__(self, groups: dict[Group, Ranks], engine: int, device: int) -> None:
        self._groups = groups
        self._engine = engine
        self._device = device

    def broadcast(self, size: int, x: torch.Tensor, src: int) -> torch.Tensor:
        """Among the devices of the group of this size."""
        group = aligned_group(self._engine, size)
        return self._groups[group].broadcast_of(self._device * size + self._engine - group[0])(x, src)

    def any_of(self, size: int, value: bool) -> bool:
        """Return on all members of the group of this size at the same time."""
        self._groups[aligned_group(self._engine, size)].wait()
        return value
