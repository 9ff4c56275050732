"""The CPUs that this process may use, and the CPU time that its cgroup may use.

Read from /sys and /proc: `doctor` and the launchers of nodes have neither torch nor vLLM loaded.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")


@dataclass(frozen=True)
class Topology:
    """What this process may use, by its affinity.

    `nodes`: the NUMA node of each logical CPU, by its number. `cores`: one CPU of each physical
    core, the last, as vLLM chooses: two threads on one core share its vector units. `quota_cpus`:
    CPU time that the cgroup may use, in CPUs; None: no limit.
    """

    nodes: Mapping[int, int]
    cores: tuple[int, ...]
    quota_cpus: float | None = None

    @property
    def usable_cores(self) -> int:
        """The number of cores that the quota has time for."""
        return self.threads(len(self.cores))

    def threads(self, cores: int, devices: int = 1) -> int:
        """Return how many threads run on a device's cores; `devices` share the quota."""
        limit = cores if self.quota_cpus is None else int(self.quota_cpus / devices)
        return max(1, min(cores, limit))


def read_topology(root: Path = ROOT, allowed: Iterable[int] | None = None) -> Topology:
    """Read the topology of this machine; `allowed`: CPUs, the process's affinity by default."""
    if allowed is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        allowed = os.sched_getaffinity(0) if has_affinity else range(os.cpu_count() or 1)
    nodes = dict.fromkeys(sorted(allowed), 0)
    cores: dict[tuple[int, ...], int] = {}
    for path in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"):
        text = _text(path)  # a node may have memory alone
        here = nodes.keys() & parse_cpus(text) if text else ()
        nodes |= dict.fromkeys(here, int(path.parent.name.removeprefix("node")))
    for cpu in nodes:
        siblings = _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores[parse_cpus(siblings or str(cpu))] = cpu
    return Topology(nodes, tuple(sorted(cores.values())), min(_quotas_cpus(root), default=None))


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the numbers in a list like 0-2,4, each once. Raises ValueError for another text."""
    found: set[int] = set()
    for piece in text.split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        numbers = range(int(ends[1]), int(ends[2] or ends[1]) + 1) if ends else ()
        if not numbers:
            raise ValueError(f"{text!r} is not a list like 0-3,8")
        found.update(numbers)
    return tuple(sorted(found))


def format_cpus(numbers: Iterable[int]) -> str:
    """Return numbers as a list like 0-2,4, which `parse_cpus` reads."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _quotas_cpus(root: Path) -> Iterator[float]:
    """Yield limits that cgroups, of version 1 and 2, set this process's CPU time. In a container a
    path may be the outer one, so the mount itself is looked at, too.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        for above in (PurePosixPath(path), *PurePosixPath(path).parents):
            cgroup = mount / above.relative_to("/")
            quota, _, period = _text(cgroup / "cpu.max").partition(" ")
            quota = quota or _text(cgroup / "cpu.cfs_quota_us")
            if quota.isdecimal() and int(quota):  # others: max, -1
                yield int(quota) / int(period or _text(cgroup / "cpu.cfs_period_us"))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
