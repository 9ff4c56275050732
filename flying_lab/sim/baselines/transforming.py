"""Servers whose engines join and part by Gyges' scheduler, and differ in what a group is and in how
it is made.

By name:

- `gyges`: a group is tensor parallel. Its KV memory is the engines', and that of the feed-forward
  weights. It is made in place, beside steps.
- `gyges-stopped`: as `gyges`, but engines are stopped while a group is made.
- `gyges-by-length`: as `gyges`, but only for requests that no instance could ever hold.
- `gyges-round-robin`, `gyges-least-load`: as `gyges`; requests go to any instance.
- `seesaw`: a group is tensor parallel. Its KV memory is the engines', and that of all divided
  weights. It is made through host memory, with engines stopped.
- `kunserve`: a group is a pipeline, each engine with a share of the layers. It has the memory of
  `seesaw`, and is made in place, beside steps.
- `loongserve`: a group is sequence parallel, with all weights in each engine. Its KV memory is the
  engines'. It is made at once, nothing is copied.
- `kunserve-serial`, `loongserve-serial`: as without `-serial`, but one engine of a group works at a
  time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flying_lab.sim.baselines.instances import Route, Transforming, Transforms
from flying_lab.sim.baselines.parallelisms import pipelined
from flying_lab.sim.cluster import Cluster, Options
from flying_lab.sim.machine import DegreeTime, Modelled
from flying_lab.sim.memory import Lent
from flying_lab.sim.node import System
from flying_lab.sim.system import system_of
from flying_lab.sim.token_parallel import sequence_parallel
from flying_lab.sim.transformation import Pause, Transformation, Work
from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.requests import RequestState
from flying_serving.controller.settings import Capacity
from flying_serving.errors import ConfigError
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.policies import POLICIES

WIDEST = 4
"""The most engines of a group: the paper's groups have degree 4."""
Make = Callable[[Transformation, Work], Pause]


@dataclass(frozen=True)
class _Kind:
    """A kind of group: its steps, the weights that it lends, how it is made, and how instances are
    chosen.
    """

    parallel: Callable[[Modelled, int, int], DegreeTime]
    lent: Lent
    make: Make
    route: Route = "gyges"


def _tensor(machine: Modelled, devices: int, size: int) -> DegreeTime:
    return machine.step_time(devices * size)


def _sequence(machine: Modelled, devices: int, size: int) -> DegreeTime:
    return sequence_parallel(machine.model, machine.kind.hardware, devices, devices * size)


def _serial(machine: Modelled, devices: int, size: int) -> DegreeTime:
    """Return the step times of a group of which one engine works at a time.

    Gyges' section 2 says that of pipelines and sequence parallelism.
    """
    return machine.step_time(devices)


def _beside(way: Transformation, work: Work) -> Pause:
    return way.staggered(work)


def _stopped(way: Transformation, work: Work) -> Pause:
    return Pause(way.apart_s(work))


def _nothing(way: Transformation, work: Work) -> Pause:
    return Pause(0.0)


KINDS = {
    "gyges": _Kind(_tensor, "mlp", _beside),
    "gyges-stopped": _Kind(_tensor, "mlp", _stopped),
    "gyges-by-length": _Kind(_tensor, "mlp", _beside, "by-length"),
    "gyges-round-robin": _Kind(_tensor, "mlp", _beside, "round-robin"),
    "gyges-least-load": _Kind(_tensor, "mlp", _beside, "least-load"),
    "seesaw": _Kind(_tensor, "all", _stopped),
    "kunserve": _Kind(pipelined, "all", _beside),
    "loongserve": _Kind(_sequence, "nothing", _nothing),
    "kunserve-serial": _Kind(_serial, "all", _beside),
    "loongserve-serial": _Kind(_serial, "nothing", _nothing),
}
"""The kinds of servers, by the name of the system."""


class Anywhere(GroupChoice):
    """A choice of any group. `Transforms` chooses instances after it."""

    def choose(self, request: RequestState, layout: Layout, *_: Any, **__: Any) -> Group:
        """Return the first group of the layout."""
        return layout.groups[0]


def transforming(machine: Modelled, devices: int, options: Options, name: str) -> System:
    """Build a server of one of KINDS, of engines of `devices` devices.

    Raises:
        ConfigError: no two engines can join.
    """
    sizes = [
        degree // devices for degree in machine.degrees(devices) if 1 < degree // devices <= WIDEST
    ]
    if not sizes:
        raise ConfigError(
            f"--policy={name!r}: needs engines that can join into groups of 2 or {WIDEST}"
        )
    kind, size = KINDS[name], sizes[-1]
    way = Transformation(machine.model, machine.kind.hardware, devices, devices * size)
    engine = machine.engine(devices, (1, size), devices)
    lent_blocks = machine.lent_blocks(devices, size, kind.lent)
    times = {1: machine.step_time(devices), size: kind.parallel(machine, devices, size)}
    system = system_of(machine, POLICIES["static-dp"], options, engine, times)
    tokens = {one: (engine.blocks - 1) * engine.block_tokens[one] for one in (1, size)}
    tokens[size] += lent_blocks * engine.block_tokens[size]
    settings = replace(system.settings, capacity=Capacity(tokens, devices))
    up, down = _changes(way, kind, through_host=name == "seesaw")
    how = Transforming(size, lent_blocks, up, down, kind.route)

    def sender(cluster: Cluster, mean_outputs: Callable[[], float]) -> Transforms:
        return Transforms(cluster, how, mean_outputs)

    return replace(system, name=name, settings=settings, placing=Anywhere, sender=sender)


def _changes(
    way: Transformation, kind: _Kind, *, through_host: bool
) -> tuple[Callable[[float], Pause], Callable[[float], Pause]]:
    def up(tokens: float) -> Pause:
        work = way.through_host(tokens, way.degree) if through_host else way.kv(tokens) + way.lend()
        return kind.make(way, work)

    def down(tokens: float) -> Pause:
        work = (
            way.through_host(tokens, way.engine)
            if through_host
            else way.kv(tokens) + way.give_back(kind.lent)
        )
        return kind.make(way, work)

    return up, down
