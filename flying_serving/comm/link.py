"""A slower link between engines, emulated: to measure policies where exchanges cost what they cost elsewhere."""

from __future__ import annotations

import time
from typing import Protocol

import torch

SPIN_S = 100e-6
"""How long before its end a pause stops sleeping: a sleep ends that much late, or less, unless the cores are busy."""


class Collectives(Protocol):
    """What vLLM's communicators are given in place of their own: see ShmGroup."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks."""

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenate the ranks' tensors."""

    def gather(self, x: torch.Tensor, dst: int, dim: int = -1) -> torch.Tensor | None:
        """Concatenate the ranks' tensors on one rank."""

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """Give one rank's tensor to all."""


class EmulatedLink:
    """Collectives that each take longer, on every rank, by a latency and the time that a rank's tensor is on its way.

    Args:
        group: does the work.
        latency_us: microseconds for each collective.
        gb_per_s: 10^9 bytes per second.
    """

    def __init__(self, group: Collectives, latency_us: float, gb_per_s: float) -> None:
        self._group = group
        self._latency_s = latency_us * 1e-6
        self._bytes_per_s = gb_per_s * 1e9

    def pause_s(self, x: torch.Tensor) -> float:
        """How much longer a collective of `x` takes."""
        return self._latency_s + x.nbytes / self._bytes_per_s

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The group's, and a pause."""
        result = self._group.all_reduce(x)
        _pause(self.pause_s(x))
        return result

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The group's, and a pause."""
        result = self._group.all_gather(x, dim)
        _pause(self.pause_s(x))
        return result

    def gather(self, x: torch.Tensor, dst: int, dim: int = -1) -> torch.Tensor | None:
        """The group's, and a pause, also on the ranks that do not wait."""
        result = self._group.gather(x, dst, dim)
        _pause(self.pause_s(x))
        return result

    def broadcast(self, x: torch.Tensor, src: int) -> torch.Tensor:
        """The group's, and a pause, also on the rank that does not wait."""
        result = self._group.broadcast(x, src)
        _pause(self.pause_s(x))
        return result


def _pause(duration_s: float) -> None:
    """Return after `duration_s`, within some 20 us: asleep, so that the core is free, but awake before the end."""
    end_s = time.perf_counter() + duration_s
    if duration_s > SPIN_S:
        time.sleep(duration_s - SPIN_S)
    while time.perf_counter() < end_s:
        pass
