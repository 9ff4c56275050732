"""The choice of cores and of the number of threads for each device of each engine: pure. A process
takes the place that was chosen for its device by `Placement.bind`.

A NUMA node is what vLLM's CPU users treat as a card: a device has cores of one node, and vLLM binds
its memory to the node of the first of them.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from flying_serving.errors import ConfigError
from flying_serving.placement.topology import Topology, format_cpus, parse_cpus

BIND, THREADS = "VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"
AUTO, NOBIND = "auto", "nobind"
WITHOUT_EFFECT = ("VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_SIM_MULTI_NUMA")
"""Variables of vLLM's placement that the plan does not read."""
SPARES_CORE_CORES = 16
"""A device with at least this many cores leaves one, as vLLM's do, to the API server and to threads
beside OpenMP's. A core that two threads need delays all threads of a step.
"""


_HARMLESS = {
    "OMP_PROC_BIND": ("", "false"),
    "OMP_PLACES": ("",),
    "GOMP_CPU_AFFINITY": (),  # libgomp takes an empty value for one CPU
    "KMP_AFFINITY": ("", "none", "disabled"),
}
"""Variables by which OpenMP's libraries bind threads, and their values that bind none."""


class Placement(BaseModel):
    """The place of a device. `cpus`: where its threads may run; none: they are not bound.
    `threads`: of OpenMP. `node`: the NUMA node of the first CPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpus: tuple[int, ...]
    threads: int
    node: int

    def __str__(self) -> str:
        cores = f"{'core' if len(self.cpus) == 1 else 'cores'} {format_cpus(self.cpus)}"
        threads = f"{self.threads} {'thread' if self.threads == 1 else 'threads'}"
        return f"node {self.node}, {cores if self.cpus else 'any core'}, {threads}"

    def bind(self) -> None:
        """Restrict this process, with all threads that it has or starts later, to the cores. Set
        the number of OpenMP threads for libraries that are loaded later.

        vLLM binds workers by variables that OpenMP's library reads when a program begins: too late
        for a fork. So the process is bound as a whole, before OpenMP has threads, which inherit its
        cores.

        Raises:
            ConfigError: if the process cannot have the cores.
        """
        for thread in Path("/proc/self/task").iterdir() if self.cpus else ():
            try:
                os.sched_setaffinity(int(thread.name), self.cpus)
            except ProcessLookupError:
                continue  # it has ended
            except OSError as error:
                cores = format_cpus(self.cpus)
                raise ConfigError(f"cores {cores} cannot be used: {error.strerror}") from None
        os.environ[THREADS] = str(self.threads)


def device_name(index: int, devices: int) -> str:
    """Return the name of a device by its index; `devices`: of each engine."""
    engine, device = divmod(index, devices)
    return f"engine {engine}" if devices == 1 else f"engine {engine} device {device}"


def plan(
    topology: Topology, variables: Mapping[str, str], engines: int, devices: int
) -> tuple[Placement, ...]:
    """Return the placement of each device of each engine, engine 0's first; `devices`: of each
    engine. `variables`: of the environment. Raises ConfigError, naming a variable that cannot be
    satisfied here, its value and what is allowed.
    """
    _refuse_binding_by_openmp(variables)
    count, bind = engines * devices, variables.get(BIND, AUTO).strip()
    if bind == NOBIND:
        lists: list[tuple[int, ...]] = [()] * count
        cores = [len(topology.cores) // count] * count
    elif bind == AUTO:
        shares = _shares(topology, count)
        lists = [share[: len(share) - (len(share) >= SPARES_CORE_CORES)] for share in shares]
        least = min(map(len, lists))  # a group waits for its slowest device
        cores = [least if len(set(lists)) == count else 1] * count
    else:
        lists = _listed(bind, count, topology)
        cores = list(map(len, lists))
    given = variables.get(THREADS, "").partition(",")[0].strip()  # of the outermost region
    if given and not (given.isdecimal() and int(given)):
        raise ConfigError(f"{THREADS}={variables[THREADS]!r}: must be a whole number from 1")
    return tuple(
        Placement(
            cpus=cpus,
            threads=int(given) if given else topology.threads(most, count),
            node=topology.nodes[min(cpus or topology.nodes)],
        )
        for cpus, most in zip(lists, cores, strict=True)
    )


def _shares(topology: Topology, count: int) -> list[tuple[int, ...]]:
    """Return the cores of each device: an even share of its node's, or all if there are too few.

    A group runs at the pace of its slowest device, so the smallest share is as large as possible:
    each device in turn goes to the node where its share is the largest.
    """
    nodes: dict[int, list[int]] = {}
    for cpu in topology.cores:
        nodes.setdefault(topology.nodes[cpu], []).append(cpu)
    guests = dict.fromkeys(sorted(nodes), 0)

    def next_share(node: int) -> tuple[int, float]:
        # of equal ones that of the emptier node, which has memory of its own
        cores = len(nodes[node])
        return cores // (guests[node] + 1), -guests[node] / cores

    for _ in range(count):
        guests[max(guests, key=next_share)] += 1
    shares: list[tuple[int, ...]] = []
    for node, hosted in guests.items():
        cores = nodes[node]
        size = len(cores) // max(hosted, 1)
        starts = [guest * size for guest in range(hosted)]
        shares += [tuple(cores[start : start + size] or cores) for start in starts]
    return shares


def _listed(bind: str, count: int, topology: Topology) -> list[tuple[int, ...]]:
    """Return the CPUs that a user lists for each device. Raises ConfigError for another text."""
    lists = "one list of CPUs" if count == 1 else f"{count} lists of CPUs with | between"
    must = f"must be {AUTO!r}, {NOBIND!r} or {lists} for each device of each engine, like 0-3,8"
    try:
        found = [parse_cpus(part.strip()) for part in bind.split("|")]
    except ValueError as error:
        raise ConfigError(f"{BIND}={bind!r}: {error}; {must}") from None
    for cpu in (cpu for cpus in found for cpu in cpus if cpu not in topology.nodes):
        allowed = f"one of those that this process may use, {format_cpus(topology.nodes)}"
        raise ConfigError(f"{BIND}={bind!r}: CPU {cpu} is not {allowed}")
    if len(found) != count:
        lists = f"{len(found)} {'list' if len(found) == 1 else 'lists'}"
        raise ConfigError(f"{BIND}={bind!r}: {lists}; {must}")
    return found


def _refuse_binding_by_openmp(variables: Mapping[str, str]) -> None:
    """Raise ConfigError if OpenMP's library would bind the main thread to one place as it is
    loaded, with torch: engines are forked with the affinity of that place alone.
    """
    is_off = variables.get("OMP_PROC_BIND", "").strip().lower() == "false"
    for name, harmless in _HARMLESS.items():
        if is_off and name in ("OMP_PLACES", "GOMP_CPU_AFFINITY"):
            continue  # libgomp reads neither then
        value = variables.get(name)
        if value is not None and value.strip().lower() not in harmless:
            must = "must be unset or 'false'" if name == "OMP_PROC_BIND" else "must be unset"
            why = f"it would bind all engines to the same cores; {BIND} gives each engine its own"
            raise ConfigError(f"{name}={value!r}: {must}, as {why}")
