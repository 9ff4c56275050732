"""Every system that can be simulated, by name: our policies, and what they are compared with.

- `static-dp`, `static-tp`, `static-tp2` ...: stock vLLM at one degree, whose engines hold the weights once each; so a
  wide one has more room for KV than a group of ours, whose members each hold all of an engine's weights.
- `round-robin`, `least-load`: `static-dp` with a router that counts requests only.
- `split`: our server apart, with requests split over pairs of engines as `policy/split.py` plans them (DynaServe).
- `pd-disagg`: disaggregated serving: the first engine of a pair computes prompts, the second one decodes.
- `shift-parallel`: Shift Parallelism (Arctic Inference): all devices in one engine, tensor parallel for small batches
  and sequence parallel for large ones, chosen by each step's tokens; both have the same KV layout.
- `gyges`, `gyges-...`, `seesaw`, `kunserve`, `loongserve`: engines that join and part, see `sim/transforming.py`.
- `fork`: what the Flying Serving authors have released: eager mode, waits for old requests before it switches for load,
  cannot switch while idle, and computes requests again that a hard switch has paused. When to switch, which they leave
  to an operator, is decided by `auto`'s predictions, with the cost of waiting.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flying_lab.sim.cluster import Options
from flying_lab.sim.cost import LaneCost
from flying_lab.sim.machine import DegreeTime, Machine, Modelled
from flying_lab.sim.node import System
from flying_lab.sim.parallelisms import sequence_parallel
from flying_lab.sim.requests import SimStep
from flying_lab.sim.splits import Splitting
from flying_lab.sim.system import flying, static
from flying_lab.sim.transforming import KINDS, transforming
from flying_serving.controller.loads import Loads
from flying_serving.controller.placing import Placing
from flying_serving.controller.requests import RequestState
from flying_serving.errors import ConfigError
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.policies import POLICIES, Policy, least_gain
from flying_serving.policy.snapshot import Decision, Snapshot
from flying_serving.predict.work import Objective

FLYING = ("auto", "load", "priority", "context")
PAIRS = ("split", "pd-disagg")


def names(machine: Machine) -> list[str]:
    """Every system that this machine can run."""
    degrees = [f"static-tp{degree}" for degree in machine.degrees(machine.smallest_engine) if degree > 1]
    modelled = ["shift-parallel", "fork"] if isinstance(machine, Modelled) else []
    pairs = machine.handoff(machine.smallest_engine) and machine.devices >= 2 * machine.smallest_engine
    modelled += KINDS if modelled and len(machine.degrees(machine.smallest_engine)) > 1 else []
    return [*FLYING, "static-dp", "static-tp", *degrees, *ROUTERS, *(PAIRS if pairs else ()), *modelled]


def build(name: str, machine: Machine, devices: int, options: Options) -> System:
    """The system of a name; `devices` are those of an engine if the name does not say its degree.

    Raises:
        ConfigError: an unknown name, with those that there are; or what the machine cannot do.
    """
    if name not in names(machine):
        raise ConfigError(f"--policy={name!r}: not one of {', '.join(names(machine))}")
    apart, widest = POLICIES["static-dp"], machine.degrees(devices)[-1]
    if name in FLYING:
        system = flying(machine, devices, POLICIES[name], options)
    elif name == "fork":
        policy = Draining("fork", by_load=True, by_priority=True, by_context=True)
        system = flying(machine, devices, policy, options, "eager", recomputes=True)
    elif name == "shift-parallel":
        assert isinstance(machine, Modelled)
        time = shifting(machine, devices, widest)
        system = static(machine, widest, apart, options, resident=devices, time=time)
    elif name in KINDS:
        assert isinstance(machine, Modelled)
        system = transforming(machine, devices, options, name)
    elif name in PAIRS:
        system = paired(machine, devices, options, name)
    elif name.startswith("static-tp"):
        system = static(machine, int(name.removeprefix("static-tp") or widest), apart, options)
    else:
        system = static(machine, devices, apart, options)
        system = replace(system, placing=ROUTERS.get(name, Placing))
    return replace(system, name=name)


def paired(machine: Machine, devices: int, options: Options, name: str) -> System:
    """Engines of `devices` devices whose requests may be split over two of them; in ours, each has a lane."""
    handoff = machine.handoff(devices)
    if handoff is None or machine.devices % (2 * devices):
        raise ConfigError(f"--policy={name!r}: needs pairs of engines between which KV can be pulled")
    time = machine.step_time(devices, size=1) if name == "split" else None
    system = static(machine, devices, POLICIES["static-dp"], options, time=time)
    return replace(system, splitting=Splitting("planned" if name == "split" else "prompt", handoff))


def shifting(machine: Modelled, base: int, degree: int) -> DegreeTime:
    """Steps of Shift Parallelism: tensor parallel over all or sequence parallel over `degree / base`, as is faster."""
    tensor = LaneCost(machine.model, machine.kind.hardware, degree)
    sequence = sequence_parallel(machine, base, degree)
    parts = degree // base

    def seconds(step: SimStep) -> float:
        whole_s = tensor.step_s(step.sequences, step.decode_context_tokens, step.chunks)
        if parts == 1 or step.sequences + step.prefill_tokens < parts:
            return whole_s
        return min(whole_s, sequence(step))

    return seconds


@dataclass(frozen=True)
class Draining(Policy):
    """Decides when to switch by `auto`'s predictions, but can neither weave nor keep KV, and weighs what that costs."""

    def decide(self, snapshot: Snapshot, objective: Objective) -> Decision | None:
        """As its base; for urgent requests by a hard switch, else by waiting for the old ones, however long.

        A switch for load must gain as much more than waiting costs as `auto` asks for.
        """
        decision = super().decide(snapshot, objective)
        if decision is None or not decision.is_made:
            return decision
        mode = "hard" if any(need.urgent for need in snapshot.needs) else "sequential"
        # Waiting is no way if no request runs there (the release cannot switch while idle) or one fits no group.
        cost = decision.considered.get(mode, decision.cost if decision.stay is None else math.inf)
        needed = None if decision.stay is None else least_gain(decision.stay, cost, snapshot)
        return replace(decision, mode=mode, cost=cost, least_gain=needed, drain_s=math.inf)


class RoundRobin(Placing):
    """One group after the other."""

    _next = 0

    def place(self, state: RequestState, layout: Layout, *_: Any, **__: Any) -> Group:
        """The next one."""
        self._next += 1
        return layout.groups[(self._next - 1) % len(layout.groups)]


class LeastLoad(Placing):
    """The group with the fewest requests."""

    def place(self, state: RequestState, layout: Layout, loads: Loads, *_: Any, **__: Any) -> Group:
        """The first of those with the fewest."""
        return min(layout.groups, key=lambda group: len(loads[group].requests))


ROUTERS: Mapping[str, type[Placing]] = {"round-robin": RoundRobin, "least-load": LeastLoad}
