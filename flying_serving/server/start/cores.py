"""What a start would give engines on the CPU of this machine, in rows of `doctor`'s table."""

import os
from collections.abc import Mapping
from typing import Literal

from flying_serving.config import MAX_ENGINES
from flying_serving.errors import ConfigError
from flying_serving.placement.plan import device_name, plan
from flying_serving.placement.topology import Topology, read_topology

State = Literal["ok", "warn", "bad"]
Row = tuple[State, str, str]  # state, subject, reason


def of_this_machine(*, on_cpu: bool) -> list[Row]:
    """Return the rows of this machine. `on_cpu`: whether engines would run on its cores."""
    topology = read_topology()
    return [usable_cores(topology), *(of_engines(topology, os.environ) if on_cpu else ())]


def usable_cores(topology: Topology) -> Row:
    """Report the cores that this process may use, by affinity and by the quota of its cgroup."""
    count = topology.usable_cores
    if count < 2:
        return "warn", "cores", "1: engines share it, so a group is not faster than one engine"
    limited = count < len(topology.cores)
    return "ok", "cores", f"{count}{', by the quota of the cgroup' if limited else ''}"


def of_engines(topology: Topology, variables: Mapping[str, str]) -> list[Row]:
    """Report cores, threads and memory of engines on the CPU, a row for each number of engines that
    a server can have. `variables`: of the environment.
    """
    rows = [_placement(topology, variables, engines) for engines in (1, 2, 4, MAX_ENGINES)]
    if all(state == "bad" for state, _, _ in rows):
        return [("bad", "placement", rows[0][2])]
    return [("warn" if state == "bad" else state, name, reason) for state, name, reason in rows]


def _placement(topology: Topology, variables: Mapping[str, str], engines: int) -> Row:
    name = "1 engine" if engines == 1 else f"{engines} engines"
    try:
        planned = plan(topology, variables, engines, devices=1)
    except ConfigError as error:
        return "bad", name, str(error)
    if engines > 1 and len(set(planned)) == 1:
        return "ok", name, f"each: {planned[0]}"
    return (
        "ok",
        name,
        "\n".join(f"{device_name(index, 1)}: {one}" for index, one in enumerate(planned)),
    )
