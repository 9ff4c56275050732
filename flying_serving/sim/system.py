"""A server to simulate: a policy on a machine, with its controller's settings, engines and step times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from flying_serving.controller.capacity import Capacity
from flying_serving.controller.placing import Limits, Placing
from flying_serving.controller.settings import Settings
from flying_serving.errors import ConfigError
from flying_serving.policy.policies import Policy
from flying_serving.predict.steps import Step
from flying_serving.predict.work import Weights
from flying_serving.sim.cluster import Clock, ClusterShape, StepTime
from flying_serving.sim.coordination import DegreeTime
from flying_serving.sim.cost import Execution
from flying_serving.sim.machine import Engine, Machine
from flying_serving.sim.node import SimNode
from flying_serving.sim.requests import SimRequest, SimStep
from flying_serving.worker.probes import ENOUGH_S, probes


@dataclass(frozen=True)
class Options:
    """Of all systems that are compared; the defaults are vLLM's for a server on large devices, and ours.

    Args:
        slots: requests per group at a time (`--max-num-seqs`).
        budget_tokens: tokens per step (`--max-num-batched-tokens`).
        horizon_s, ttft_weight, weave_steps, max_pause_s: as in the server's settings.
        message_s: between the API server and an engine, one way.
        keep_times: whether the time of each token is kept.
    """

    slots: int = 1024
    budget_tokens: int = 8192
    horizon_s: float = 20.0
    ttft_weight: float = 15.0
    weave_steps: int = 1
    max_pause_s: float = 1.0
    message_s: float = 0.0005
    keep_times: bool = True


@dataclass(frozen=True)
class System:
    """A server that can be started as often as one likes.

    `degrees` has the devices of each group size. `placing` makes another way to choose groups than the controller's.
    """

    name: str
    settings: Settings
    shape: ClusterShape
    step_time: StepTime
    calibration: tuple[Step, ...]
    degrees: Mapping[int, int]
    placing: Callable[[Settings], Placing] | None = None

    def node(self, clock: Clock, on_end: Callable[[SimRequest], None] | None = None) -> SimNode:
        """A fresh server."""
        placing = self.placing(self.settings) if self.placing else None
        return SimNode(self.settings, self.shape, self.step_time, clock, self.calibration, on_end, placing)


def check_engine(machine: Machine, devices: int) -> None:
    """Reject an engine that the machine or the model cannot have.

    Raises:
        ConfigError: naming what is allowed.
    """
    allowed = machine.degrees(machine.smallest_engine)
    if devices not in allowed or machine.devices % devices:
        raise ConfigError(f"--devices-per-engine={devices}: must be one of {', '.join(map(str, allowed))}")


def flying(
    machine: Machine,
    devices: int,
    policy: Policy,
    options: Options,
    execution: Execution = "graph",
    *,
    recomputes: bool = False,
) -> System:
    """Our server with a policy: engines of `devices` devices in groups of every size that the model allows."""
    check_engine(machine, devices)
    sizes = [degree // devices for degree in machine.degrees(devices) if degree % devices == 0]
    times = {size: machine.lane_time(size * devices, size, execution) for size in sizes}
    engine = machine.engine(devices, sizes, devices)
    system = _system(machine, policy, options, engine, devices, times)
    if recomputes:
        return replace(system, shape=replace(system.shape, recomputes=True))
    moves = {size: cost for size in sizes if size > 1 and (cost := machine.moving(size * devices)) is not None}
    return replace(system, shape=replace(system.shape, moves=moves))


def static(
    machine: Machine, degree: int, policy: Policy, options: Options, resident: int = 0, time: DegreeTime | None = None
) -> System:
    """Stock vLLM: engines of `degree` devices that stay apart.

    Args:
        machine: where.
        degree: devices of an engine.
        policy: one that never changes the layout.
        options: of all systems.
        resident: devices that hold the weights once, if not those of an engine.
        time: how long steps take, if not as usual.
    """
    check_engine(machine, degree)
    engine = machine.engine(resident or degree, (1,), degree)
    return _system(machine, policy, options, engine, degree, {1: time or machine.step_time(degree)})


def _system(
    machine: Machine,
    policy: Policy,
    options: Options,
    engine: Engine,
    devices: int,
    times: Mapping[int, DegreeTime],
) -> System:
    engines, sizes = machine.devices // devices, sorted(times)
    capacity = Capacity({s: (engine.blocks - 1) * engine.block_tokens[s] for s in sizes}, devices)
    settings = Settings(
        engines=engines,
        capacity=capacity,
        policy=policy,
        limits=Limits(options.slots, options.budget_tokens, capped=policy.pinned_size is None),
        weights=Weights(options.horizon_s, options.ttft_weight),
        weave_steps=options.weave_steps,
    )
    shape = ClusterShape(
        engines=engines,
        sizes=tuple(sizes),
        blocks=engine.blocks,
        block_tokens=dict(engine.block_tokens),
        slots=options.slots,
        budget_tokens=options.budget_tokens,
        message_s=options.message_s,
        frontend_s=machine.frontend_s,
        max_pause_s=options.max_pause_s,
        weave_steps=options.weave_steps,
        keep_times=options.keep_times,
    )

    def step_time(size: int, plan: SimStep) -> float:
        return times[size](plan)

    degrees = {size: size * devices for size in sizes}
    return System(policy.name, settings, shape, step_time, _calibration(times, shape), degrees)


def _calibration(times: Mapping[int, DegreeTime], shape: ClusterShape) -> tuple[Step, ...]:
    """What a live server would measure at its start."""
    steps = []
    for size in shape.sizes:
        room = (shape.blocks - 1) * shape.block_tokens[size]
        ended: set[tuple[bool, int]] = set()
        for probe in probes(shape.slots, shape.budget_tokens, room):
            step = Step.of_probe(size, 0.0, probe.tokens, probe.is_prefill, probe.context_tokens)
            chunks = [(probe.tokens, probe.context_tokens)] if probe.is_prefill else []
            decodes = 0 if probe.is_prefill else step.context_tokens
            took_s = times[size](SimStep([], chunks, step.prefill_tokens, step.sequences, decodes))
            if probe.kind not in ended:
                steps.append(replace(step, duration_s=took_s))
            if took_s > ENOUGH_S:
                ended.add(probe.kind)
    return tuple(steps)
