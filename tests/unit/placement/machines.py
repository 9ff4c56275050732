"""Machines that are not at hand: as topologies, and as folders like /sys and /proc."""

from collections.abc import Mapping
from pathlib import Path

from flying_serving.placement.topology import Topology, format_cpus


def machine(
    *cores_of_nodes: int, threads_per_core: int = 1, quota_cpus: float | None = None
) -> Topology:
    """As Linux numbers CPUs: the first thread of every core, node by node, then the second
    threads.
    """
    of_cores = [node for node, cores in enumerate(cores_of_nodes) for _ in range(cores)]
    count = len(of_cores)
    nodes = {
        thread * count + core: node
        for thread in range(threads_per_core)
        for core, node in enumerate(of_cores)
    }
    last = (threads_per_core - 1) * count
    return Topology(nodes, tuple(range(last, last + count)), quota_cpus)


def write(root: Path, files: Mapping[str, str]) -> None:
    """Write files below a folder."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")


def write_topology(root: Path, topology: Topology) -> None:
    """Write what the kernel of such a machine says of its CPUs."""
    files = {}
    count = len(topology.cores)
    for cpu, node in topology.nodes.items():
        siblings = format_cpus(other for other in topology.nodes if (other - cpu) % count == 0)
        files[f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = siblings
        on_node = format_cpus(other for other, at in topology.nodes.items() if at == node)
        files[f"sys/devices/system/node/node{node}/cpulist"] = on_node
    write(root, files)
