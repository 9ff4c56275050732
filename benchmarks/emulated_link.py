"""`flying-serving` with a slower link between engines, to measure policies where exchanges cost
more.

python -m benchmarks.emulated_link LATENCY_US,GB_PER_S serve MODEL ...: each exchange between
engines through shared memory takes that long in addition to what it takes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.entry import run
from flying_serving.comm.pool import CommunicatorPool

SPIN_S = 100e-6
"""How long before its end a pause stops sleeping: a sleep ends that much late, or less, unless the
cores are busy.
"""
NAMES = ("all_reduce", "all_gather", "gather", "broadcast", "all_to_all")


class EmulatedLink:
    """Collectives of a communicator (`NAMES`) that each take longer, on every rank, also on ranks
    that do not wait.

    Args:
        group: does the work.
        latency_us: microseconds for each collective.
        gb_per_s: 10^9 bytes of a rank's tensor per second.
    """

    def __init__(self, group: Any, latency_us: float, gb_per_s: float) -> None:
        self._latency_s = latency_us * 1e-6
        self._bytes_per_s = gb_per_s * 1e9
        for name in NAMES:
            setattr(self, name, self._slowed(getattr(group, name)))

    def pause_s(self, x: torch.Tensor) -> float:
        """How much longer a collective of `x` takes."""
        return self._latency_s + x.nbytes / self._bytes_per_s

    def _slowed(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def slowed(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = collective(x, *args, **kwargs)
            _pause(self.pause_s(x))
            return result

        return slowed


def _pause(duration_s: float) -> None:
    """Return after `duration_s`, within some 20 us: asleep, so that the core is free, but awake
    before the end.
    """
    end_s = time.perf_counter() + duration_s
    if duration_s > SPIN_S:
        time.sleep(duration_s - SPIN_S)
    while time.perf_counter() < end_s:
        pass


def slow(latency_us: float, gb_per_s: float) -> None:
    """Slow every exchange between engines of servers that this process starts; engines are forked
    from it.
    """
    use_shared_memory = CommunicatorPool.use_shared_memory

    def slowed(self: CommunicatorPool, *args: Any, **kwargs: Any) -> None:
        use_shared_memory(self, *args, **kwargs)
        for size in self.sizes:
            for coordinator in self.coordinators(size) if size > 1 else ():
                slow_down(coordinator.device_communicator, latency_us, gb_per_s)

    CommunicatorPool.use_shared_memory = slowed  # type: ignore[method-assign]


def slow_down(communicator: Any, latency_us: float, gb_per_s: float) -> None:
    """Let each collective of a communicator take longer."""
    link = EmulatedLink(communicator, latency_us, gb_per_s)
    for name in NAMES:
        setattr(communicator, name, getattr(link, name))


def main() -> None:
    """Take the link from the command line, the rest is `flying-serving`'s."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.emulated_link",
        usage="%(prog)s LATENCY_US,GB_PER_S serve MODEL ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("link", help="microseconds for each exchange, and 10^9 bytes per second")
    link = parser.parse_args(sys.argv[1:2]).link

    def change() -> None:
        del sys.argv[1]
        latency_us, gb_per_s = link.split(",")
        slow(float(latency_us), float(gb_per_s))

    run("benchmarks.emulated_link", change)


if __name__ == "__main__":
    main()
