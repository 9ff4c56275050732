"""`flying-serving` with a slower link between engines, to measure policies where exchanges cost more.

python -m benchmarks.emulated_link LATENCY_US,GB_PER_S serve MODEL ...: each exchange between engines through shared
memory takes that long in addition to what it takes.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any, Protocol

import torch

from benchmarks.entry import run
from flying_serving.comm.pool import CommunicatorPool

SPIN_S = 100e-6
"""How long before its end a pause stops sleeping: a sleep ends that much late, or less, unless the cores are busy."""


NAMES = ("all_reduce", "all_gather", "gather", "broadcast")


class Collectives(Protocol):
    """What of vLLM's communicators exchanges tensors: see ShmGroup."""

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


def slow(latency_us: float, gb_per_s: float) -> None:
    """Slow every exchange between engines of servers that this process starts; engines are forked from it."""
    use_shared_memory = CommunicatorPool.use_shared_memory

    def slowed(self: CommunicatorPool, directory: str, deadline_s: float) -> None:
        use_shared_memory(self, directory, deadline_s)
        for size, coordinator in self._coordinators.items():
            if size > 1:
                slow_down(coordinator.device_communicator, latency_us, gb_per_s)

    CommunicatorPool.use_shared_memory = slowed  # type: ignore[method-assign]


def slow_down(communicator: Any, latency_us: float, gb_per_s: float) -> None:
    """Let each collective of a communicator take longer."""
    fast = SimpleNamespace(**{name: getattr(communicator, name) for name in NAMES})
    link = EmulatedLink(fast, latency_us, gb_per_s)
    for name in NAMES:
        setattr(communicator, name, getattr(link, name))


def main() -> None:
    """Take the link from the command line, the rest is `flying-serving`'s."""

    def change() -> None:
        latency_us, gb_per_s = sys.argv.pop(1).split(",")
        slow(float(latency_us), float(gb_per_s))

    run("benchmarks.emulated_link", change)


if __name__ == "__main__":
    main()
