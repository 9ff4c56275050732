"""A server to simulate: a policy on a machine, with its controller's settings, engines and step
times.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from flying_lab.sim.cluster import ClusterShape, Options
from flying_lab.sim.cost import Execution
from flying_lab.sim.machine import DegreeTime, Engine, Machine, Modelled
from flying_lab.sim.node import System
from flying_lab.sim.requests import Chunk, SimStep
from flying_serving.controller.settings import Capacity, Limits, Settings
from flying_serving.errors import ConfigError
from flying_serving.parallelism import Parallelism
from flying_serving.policy.policies import Policy
from flying_serving.predict.probes import ENOUGH_S, probes
from flying_serving.predict.steps import Step
from flying_serving.predict.work import Objective


def check_engine(machine: Machine, devices: int) -> None:
    """Reject an engine that the machine or the model cannot have. Raises ConfigError, naming the
    allowed values.
    """
    allowed = machine.degrees(machine.smallest_engine)
    if devices not in allowed or machine.devices % devices:
        raise ConfigError(
            f"--devices-per-engine={devices}: must be one of {', '.join(map(str, allowed))}"
        )


def flying(
    machine: Machine,
    devices: int,
    policy: Policy,
    options: Options,
    execution: Execution = "graph",
    *,
    recomputes: bool = False,
) -> System:
    """Build our server with a policy: engines of `devices` devices in groups of every size that the
    model allows.

    Raises:
        ConfigError: the machine or the model cannot have such engines, or not with these options.
    """
    check_engine(machine, devices)
    sizes = [degree // devices for degree in machine.degrees(devices) if degree % devices == 0]
    times = {size: machine.step_time(size * devices, execution, size) for size in sizes}
    system = system_of(machine, policy, options, machine.engine(devices, sizes, devices), times)
    divides = options.token_parallel and not options.lend_weights and not recomputes
    if divides and isinstance(machine, Modelled):
        system = _dividing(system, times)
    if recomputes:
        return replace(system, shape=replace(system.shape, recomputes=True))
    if options.lend_weights:
        system = _lending(system, machine)
    costs = {size: machine.migration(size * devices) for size in sizes if size > 1}
    known = {size: cost for size, cost in costs.items() if cost is not None}
    return replace(system, shape=replace(system.shape, migrations=known))


def _dividing(system: System, times: Mapping[int, DegreeTime]) -> System:
    """Return the same system with groups that may divide the tokens of a step."""
    capacity, options = system.settings.capacity, system.shape.options
    found = _calibration(times, capacity, options, Parallelism.TOKEN)
    return replace(system, calibration=(*system.calibration, *found))


def _lending(system: System, machine: Machine) -> System:
    """Return the same system with a widest group that lends its weights. Raises ConfigError if it
    cannot.
    """
    settings, capacity = system.settings, system.settings.capacity
    widest = max(capacity.kv_tokens)
    if not isinstance(machine, Modelled):
        raise ConfigError("--lend-weights: what it takes is modelled for packaged devices only")
    if widest < settings.engines or widest == 1:
        raise ConfigError(
            f"--lend-weights: needs a group of all {settings.engines} engines, of two or more"
        )
    loan = machine.loan(capacity.devices, widest)
    lent_tokens = capacity.kv_tokens[widest] + loan.blocks * system.shape.block_tokens[widest]
    settings = replace(settings, capacity=replace(capacity, lent_tokens=lent_tokens))
    return replace(system, settings=settings, shape=replace(system.shape, loan=loan))


def apart(
    machine: Machine,
    degree: int,
    policy: Policy,
    options: Options,
    resident: int | None = None,
    time: DegreeTime | None = None,
) -> System:
    """Build engines of `degree` devices that stay apart, as those of stock vLLM.

    Args:
        machine, degree, policy, options: devices of an engine; a policy that never changes the
            layout.
        resident: devices that hold the weights once, if not the devices of an engine.
        time: step times, if not the machine's.
    """
    check_engine(machine, degree)
    engine = machine.engine(resident or degree, (1,), degree)
    return system_of(machine, policy, options, engine, {1: time or machine.step_time(degree)})


def system_of(
    machine: Machine,
    policy: Policy,
    options: Options,
    engine: Engine,
    times: Mapping[int, DegreeTime],
) -> System:
    """Build a server of engines that are alike, whose groups have the sizes of `times`."""
    engines = machine.devices // engine.devices
    settings = Settings(
        engines=engines,
        capacity=Capacity(
            {s: (engine.blocks - 1) * engine.block_tokens[s] for s in sorted(times)},
            engine.devices,
            {s: engine.block_tokens[s] for s in sorted(times)},
        ),
        policy=policy,
        limits=Limits(
            options.max_num_seqs,
            options.max_num_batched_tokens,
            capped=policy.splits or policy.pinned_size is None,
        ),
        objective=Objective(options.horizon_s, *options.slo_s),
        weave_steps=options.weave_steps,
        tbt_slo_s=options.tbt_slo_s,
    )
    shape = ClusterShape(
        engines,
        engine.blocks,
        engine.block_tokens,
        options,
        machine.frontend_s,
        turns={size: machine.turn(size) for size in times},
    )

    def step_time(size: int, step: SimStep) -> float:
        return times[size](step)

    return System(
        policy.name, settings, shape, step_time, _calibration(times, settings.capacity, options)
    )


def _calibration(
    times: Mapping[int, DegreeTime],
    capacity: Capacity,
    options: Options,
    parallelism: Parallelism = Parallelism.TENSOR,
) -> tuple[Step, ...]:
    """Return the steps that a live server would measure at its start, if they divide this."""
    return tuple(
        step
        for size, room_tokens in capacity.kv_tokens.items()
        for step in _measured(times[size], size, room_tokens, options, parallelism)
    )


def _measured(
    time: DegreeTime, size: int, room_tokens: int, options: Options, parallelism: Parallelism
) -> Iterator[Step]:
    """Yield what a group of this size would measure."""
    ended: set[tuple[bool, int]] = set()
    for probe in probes(options.max_num_seqs, options.max_num_batched_tokens, room_tokens):
        if probe.kind in ended or not probe.measures(size, parallelism):
            continue
        tokens, before = probe.tokens, probe.context_tokens
        step = (
            SimStep([Chunk(tokens, before)])
            if probe.is_prefill
            else SimStep([], tokens, tokens * before)
        )
        step.parallelism = parallelism
        took_s = time(step)
        yield Step.of_probe(size, took_s, tokens, probe.is_prefill, before, parallelism)
        if took_s > ENOUGH_S:
            ended.add(probe.kind)
