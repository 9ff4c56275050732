"""The logical CPUs that this process may use, their cores and NUMA nodes, and the CPU time that its
cgroup may use.

Read from /sys and /proc: `doctor` and the launchers of nodes have neither torch nor vLLM loaded.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_CPU_LIST = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


@dataclass(frozen=True)
class Cpu:
    """A logical CPU. `core`: the lowest CPU of its physical core. `node`: its NUMA node."""

    number: int
    core: int
    node: int


@dataclass(frozen=True)
class Topology:
    """CPUs that this process may use, by affinity, in the order of their numbers; at least one.

    `quota_cpus`: CPU time that the cgroup may use, in CPUs; None: no limit. `memory_nodes`: NUMA
    nodes whose memory this process may use.
    """

    cpus: tuple[Cpu, ...]
    quota_cpus: float | None = None
    memory_nodes: tuple[int, ...] = (0,)

    @property
    def cores(self) -> tuple[Cpu, ...]:
        """The last CPU of each physical core, as vLLM chooses: two threads on one core share its
        vector units.
        """
        last = {cpu.core: cpu for cpu in self.cpus}
        return tuple(sorted(last.values(), key=lambda cpu: cpu.number))

    @property
    def usable_cores(self) -> int:
        """The number of cores' worth of threads that can run at once: cores, as far as the quota
        reaches.
        """
        return max(1, self.within_quota(len(self.cores)))

    @property
    def usable_cpus(self) -> float:
        """The number of CPUs' worth of time: the logical CPUs, as far as the quota reaches."""
        return min(len(self.cpus), self.quota_cpus or len(self.cpus))

    def within_quota(self, cores: int, devices: int = 1) -> int:
        """Return how many of a device's cores its share of the quota has time for; `devices`: how
        many share the quota.
        """
        return cores if self.quota_cpus is None else min(cores, int(self.quota_cpus / devices))

    def memory_node(self, cpus: Collection[int]) -> int:
        """Return the node to whose memory vLLM binds a worker that may use these CPUs: the first
        one's, if allowed.
        """
        node = next(cpu.node for cpu in self.cpus if cpu.number in cpus)
        return node if node in self.memory_nodes else self.memory_nodes[0]


def read_topology(root: Path = ROOT, allowed: Iterable[int] | None = None) -> Topology:
    """Read the topology of this machine as far as this process may use it; `allowed`: CPUs, its
    affinity by default.
    """
    numbers = sorted(_affinity() if allowed is None else allowed)
    nodes = {cpu: node for node, cpus in _nodes(root) for cpu in cpus}
    cpus = tuple(Cpu(number, _core(root, number), nodes.get(number, 0)) for number in numbers)
    return Topology(cpus, _quota_cpus(root), _memory_nodes(root))


def parse_cpus(text: str) -> tuple[int, ...]:
    """Return the numbers in a list like 0-2,4, ascending, each once.

    Raises:
        ValueError: if it is no such list.
    """
    text = text.strip()
    if not _CPU_LIST.fullmatch(text):
        raise ValueError(f"{text!r} is not a list like 0-3,8")
    found: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if int(last or first) < int(first):
            raise ValueError(f"{piece!r} does not ascend")
        found.update(range(int(first), int(last or first) + 1))
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


def _affinity() -> set[int]:
    return (
        os.sched_getaffinity(0)
        if hasattr(os, "sched_getaffinity")
        else set(range(os.cpu_count() or 1))
    )


def _nodes(root: Path) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield NUMA nodes with their CPUs; none where the kernel has no NUMA."""
    for path in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist"):
        if text := _text(path):  # a node may have memory alone
            yield int(path.parent.name.removeprefix("node")), parse_cpus(text)


def _core(root: Path, cpu: int) -> int:
    siblings = _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return parse_cpus(siblings)[0] if siblings else cpu


def _memory_nodes(root: Path) -> tuple[int, ...]:
    for line in _text(root / "proc/self/status").splitlines():
        name, _, nodes = line.partition(":")
        if name == "Mems_allowed_list":
            return parse_cpus(nodes)
    return (0,)


def _quota_cpus(root: Path) -> float | None:
    """Return the tightest limit of this process's cgroup and those above it, of version 1 and 2."""
    limits = [limit for folder in _cgroups(root) if (limit := _limit_cpus(folder)) is not None]
    return min(limits, default=None)


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield folders of the cgroups that limit CPU time.

    In a container the path may be the outer one, while the mount begins at the container's own
    cgroup. So the mount itself is among them.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        place = PurePosixPath(path)
        for cgroup in (place, *place.parents):
            yield mount / cgroup.relative_to("/")


def _limit_cpus(folder: Path) -> float | None:
    """Return the limit that a cgroup sets itself, as files of either version say it."""
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if not quota or not period or quota == "max" or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _text(path: Path) -> str:
    """Return the text of a small file; nothing if it is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
