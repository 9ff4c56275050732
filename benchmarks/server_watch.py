"""Memory and processor time of a server's processes, of this process and of all others."""

import asyncio
import time
from pathlib import Path

import psutil

from flying_serving.placement.topology import read_topology

WATCH_INTERVAL_S = 2.0


class Watch:
    """Memory and processor time of a server, of this process and of all others."""

    def __init__(self, server: int) -> None:
        root = psutil.Process(server)
        self._processes = [root, *root.children(recursive=True)]
        self._topology = read_topology()
        self._before = self._processor_s()
        self.server_s = 0.0
        """Processor time of the server between the last two calls of `shares`."""
        self.mib: list[float] = []
        self.kinds = ""
        """Of what the last of these consists: private memory, and shared memory, which has the
        weights and KV.
        """

    def _processor_s(self) -> tuple[float, float, float, float]:
        spent = [one.cpu_times() for one in self._processes]
        numbers = self._topology.nodes
        usable = [
            times for number, times in enumerate(psutil.cpu_times(percpu=True)) if number in numbers
        ]
        busy_s = sum(sum(times) - times.idle - times.iowait - times.guest for times in usable)
        return (
            sum(one.user + one.system for one in spent),
            time.process_time(),
            busy_s,
            time.monotonic(),
        )

    def shares(self) -> str:
        """Shares of the CPU time that server and client could use since the last call."""
        before, self._before = self._before, self._processor_s()
        server_s, client_s, busy_s, passed_s = (
            now - then for now, then in zip(self._before, before, strict=True)
        )
        cpus = len(self._topology.nodes)
        usable_s = passed_s * min(cpus, self._topology.quota_cpus or cpus)
        others_s, self.server_s = max(0.0, busy_s - server_s - client_s), server_s
        return (
            f"server {server_s / usable_s:.3f}, client {client_s / usable_s:.3f}, others "
            f"{others_s / usable_s:.3f}"
        )

    def look(self) -> float:
        """MiB of all processes, now."""
        of_each = [held_mib(one.pid) for one in self._processes]
        self.mib.append(sum(one["Pss"] for one in of_each))
        shared_mib = sum(one["Pss_Shmem"] for one in of_each)
        server_mib, *engines_mib = [one["Pss_Anon"] for one in of_each]
        self.kinds = (
            f"API server {server_mib:.0f}, others {sum(engines_mib):.0f}, shared memory "
            f"{shared_mib:.0f}"
        )
        return self.mib[-1]

    async def keep_looking(self) -> None:
        """Look every WATCH_INTERVAL_S, until cancelled."""
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            self.look()


def held_mib(pid: int) -> dict[str, float]:
    """What a process holds, by the kernel's names in `smaps_rollup`. Raises OSError if it has
    ended.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    fields = [line.split() for line in lines if line.endswith("kB")]
    return {name.rstrip(":"): int(kib) / 1024 for name, kib, _ in fields}
