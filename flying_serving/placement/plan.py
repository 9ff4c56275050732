"""The choice of cores, number of threads and memory for each device of each engine: pure.

A NUMA node is what vLLM's CPU users treat as a card: a device uses the cores and the memory of one
node.
"""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import BaseModel, ConfigDict

from flying_serving.errors import ConfigError
from flying_serving.placement.topology import Cpu, Topology, format_cpus
from flying_serving.placement.wishes import (
    AUTO,
    MEMORY_NODES,
    NOBIND,
    RESERVED,
    SIMULATED,
    Wishes,
    cpus_by_device,
)

SPARES_CORE_CORES = 16
"""A device with at least this many cores leaves one, as vLLM's do, to the API server and to threads
beside OpenMP's.

It costs 1/16 of the speed at most, where a core that two threads need delays all threads of a step.
"""


class Placement(BaseModel):
    """The cores, threads and NUMA node of a device of an engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpus: tuple[int, ...]
    """CPUs that its threads may run on; none: they are not bound."""
    threads: int
    """Number of OpenMP threads."""
    node: int
    """NUMA node to whose memory vLLM binds its weights and its KV."""

    def __str__(self) -> str:
        return self.with_memory(f"bound to node {self.node}")

    def with_memory(self, policy: str) -> str:
        """Return the placement in words, with `policy` as the words for its memory."""
        cores = (
            f"{'core' if len(self.cpus) == 1 else 'cores'} {format_cpus(self.cpus)}"
            if self.cpus
            else "any core"
        )
        threads = f"{self.threads} {'thread' if self.threads == 1 else 'threads'}"
        return f"node {self.node}, {cores}, {threads}, memory {policy}"


def device_name(index: int, devices: int) -> str:
    """Return the name of the device with an index among those of all engines, each of which has
    `devices`.
    """
    engine, device = divmod(index, devices)
    return f"engine {engine}" if devices == 1 else f"engine {engine} device {device}"


def bind_string(placements: Sequence[Placement]) -> str:
    """Return the value of the variable `BIND` that gives another server of these devices the same
    cores.
    """
    if not all(placement.cpus for placement in placements):
        return NOBIND
    return "|".join(format_cpus(placement.cpus) for placement in placements)


def plan(topology: Topology, wishes: Wishes, engines: int, devices: int) -> tuple[Placement, ...]:
    """Return the placement of each device of each engine, engine 0's first; `devices`: of each
    engine.

    Raises:
        ConfigError: naming the variable, its value and what is allowed, if the wishes cannot be
            satisfied here.
    """
    count = engines * devices
    topology = _visible(topology, wishes)
    allowed = tuple(cpu.number for cpu in topology.cpus)
    if wishes.bind == NOBIND:
        threads = [max(1, topology.usable_cores // count)] * count
        lists: list[tuple[int, ...]] = [()] * count
    elif wishes.bind == AUTO:
        shares = _shares(topology, wishes, count)
        shared = any(shares.count(share) > 1 for share in shares)
        shares = _without_reserved(shares, wishes, devices)
        threads = [
            1 if shared else min(map(len, shares))
        ] * count  # a group waits for its slowest device
        lists = [tuple(cpu.number for cpu in share) for share in shares]
    else:
        lists = cpus_by_device(wishes, count, allowed)
        threads = [len(cpus) for cpus in lists]
    return tuple(
        Placement(
            cpus=cpus,
            threads=wishes.threads or max(1, topology.within_quota(own, count)),
            node=topology.memory_node(cpus or allowed),
        )
        for cpus, own in zip(lists, threads, strict=True)
    )


def _visible(topology: Topology, wishes: Wishes) -> Topology:
    """Return the topology with only the memory nodes that a user lets vLLM use."""
    if wishes.memory_nodes is None:
        return topology
    given = f"{MEMORY_NODES}={','.join(map(str, wishes.memory_nodes))}"
    nodes = tuple(node for node in topology.memory_nodes if node in wishes.memory_nodes)
    if not nodes:
        allowed = format_cpus(topology.memory_nodes)
        raise ConfigError(
            f"{given}: must have one of the nodes that this process may use, {allowed}"
        )
    return replace(topology, memory_nodes=nodes)


def _shares(topology: Topology, wishes: Wishes, count: int) -> list[Sequence[Cpu]]:
    """Return the cores of each device: an even share of its node's, or all of them if a node's
    devices have to share cores.

    Neighbours share a node, so that small groups exchange data within one.
    """
    nodes = _simulated(topology, count) if wishes.simulated else _nodes(topology)
    shares: list[Sequence[Cpu]] = []
    for cores, guests in zip(nodes, _guests(list(map(len, nodes)), count), strict=True):
        size = len(cores) // guests if guests else 0
        shares += [
            cores[place * size : (place + 1) * size] if size else cores for place in range(guests)
        ]
    return shares


def _guests(cores: Sequence[int], count: int) -> list[int]:
    """Return how many of `count` devices each node hosts; `cores`: of each node.

    A group runs at the pace of its slowest device: so the smallest share of a device is as large as
    possible. Nodes that have room for one share more get a device each, again and again, as each
    has memory of its own. Where the last devices are fewer than such nodes, they are spread evenly.
    """
    by_cores = sorted(range(len(cores)), key=lambda node: cores[node], reverse=True)
    room = _room(
        [size if node in by_cores[:count] else 0 for node, size in enumerate(cores)], count
    )
    guests = [0] * len(cores)
    while left := count - sum(guests):
        hosts = [node for node, most in enumerate(room) if guests[node] < most]
        more = min(left, len(hosts))
        for index in range(more):
            guests[hosts[index * len(hosts) // more]] += 1
    return guests


def _room(cores: Sequence[int], count: int) -> list[int]:
    """Return how many devices each node has room for, if each of `count` devices has as many
    threads as possible.
    """
    sizes = [
        size for size in range(1, max(cores) + 1) if sum(node // size for node in cores) >= count
    ]
    if not sizes:
        each = -(-count // sum(cores))
        return [node * each for node in cores]
    share = max(sizes, key=_unspared)  # the smallest of the shares with equally many threads
    return [node // share for node in cores]


def _unspared(cores: int) -> int:
    """Return how many of a device's cores its threads use, unless a user reserves some."""
    return cores - 1 if cores >= SPARES_CORE_CORES else cores


def _nodes(topology: Topology) -> list[Sequence[Cpu]]:
    """Return the cores of each NUMA node that has memory for this process; of all nodes if none
    has.
    """
    found: dict[int, list[Cpu]] = {}
    for cpu in topology.cores:
        found.setdefault(cpu.node, []).append(cpu)
    return [found[node] for node in sorted(found) if node in topology.memory_nodes] or [
        topology.cores
    ]


def _simulated(topology: Topology, count: int) -> list[Sequence[Cpu]]:
    """Return as many nodes as there are devices, for tests of several nodes on a machine that has
    one.
    """
    cores = sorted(topology.cores, key=lambda cpu: (cpu.node, cpu.number))
    size = len(cores) // count
    if not size:
        raise ConfigError(
            f"{SIMULATED}=1: {count} simulated nodes need {count} cores; this process has "
            f"{len(cores)}"
        )
    return [cores[node * size : (node + 1) * size] for node in range(count)]


def _without_reserved(
    shares: list[Sequence[Cpu]], wishes: Wishes, devices: int
) -> list[Sequence[Cpu]]:
    """Return the shares without the cores that OpenMP threads leave to others: the last ones of
    each device.

    Reserved cores of an engine are taken from its devices evenly, and from its last devices first,
    as vLLM does.
    """
    if wishes.reserved_cores is None:
        return [share[: _unspared(len(share))] for share in shares]
    most = devices * (min(map(len, shares)) - 1)
    if wishes.reserved_cores > most:
        allowed = f"must be at most {most}, so that each device has a core"
        raise ConfigError(f"{RESERVED}={wishes.reserved_cores}: {allowed}")
    each, more = divmod(wishes.reserved_cores, devices)
    return [
        share[: len(share) - each - (index % devices >= devices - more)]
        for index, share in enumerate(shares)
    ]
