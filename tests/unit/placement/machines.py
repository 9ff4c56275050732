"""Machines that are not at hand: as topologies, and as folders like /sys and /proc."""

from collections.abc import Mapping
from pathlib import Path

from flying_serving.placement.topology import Cpu, Topology, format_cpus


def machine(
    *cores_of_nodes: int, threads_per_core: int = 1, quota_cpus: float | None = None
) -> Topology:
    """As Linux numbers CPUs: the first thread of every core, node by node, then the second
    threads.
    """
    nodes = [node for node, cores in enumerate(cores_of_nodes) for _ in range(cores)]
    cpus = tuple(
        Cpu(thread * len(nodes) + core, core, node)
        for thread in range(threads_per_core)
        for core, node in enumerate(nodes)
    )
    return Topology(cpus, quota_cpus, tuple(range(len(cores_of_nodes))))


def write(root: Path, files: Mapping[str, str]) -> None:
    """Write files below a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")


def write_topology(root: Path, topology: Topology) -> None:
    """Write what the kernel of such a machine says of its CPUs and memory."""
    nodes = format_cpus(topology.memory_nodes)
    files = {"proc/self/status": f"Name:\tpython\nMems_allowed_list:\t{nodes}"}
    for cpu in topology.cpus:
        siblings = format_cpus(other.number for other in topology.cpus if other.core == cpu.core)
        files[f"sys/devices/system/cpu/cpu{cpu.number}/topology/thread_siblings_list"] = siblings
        on_node = format_cpus(other.number for other in topology.cpus if other.node == cpu.node)
        files[f"sys/devices/system/node/node{cpu.node}/cpulist"] = on_node
    write(root, files)
