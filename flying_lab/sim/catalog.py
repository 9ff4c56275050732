"""Every system that can be simulated, by name: our policies, and systems to compare with.

- `stock-dp`, `stock-tp`, `stock-tp2` ...: stock vLLM at one degree, with the rule of its router.
  Each engine holds the weights once. So a wide one has more room for KV than a group of ours, whose
  members each hold all weights of an engine.
- `round-robin`: `stock-dp` with a router that takes one engine after the other.
- `split`: our server apart, which splits requests over two engines where that is predicted better
  (DynaServe).
- `pd-disagg`: disaggregated serving: the first engine of a pair computes prompts, the second one
  decodes.
- `shift-parallel`: Shift Parallelism (Arctic Inference): all devices in one engine. Steps are
  tensor parallel for small batches and sequence parallel for large ones, by their tokens. Both have
  the same KV layout.
- `gyges-...`, `seesaw`, `kunserve`, `loongserve`: engines that join and part by policy `gyges`, see
  `baselines/transforming.py`.
- `fork`: the release of the Flying Serving authors. It runs in eager mode, and waits for old
  requests before it switches for load. It cannot switch while idle, and computes requests again
  that a hard switch has paused. The authors leave the time of a switch to an operator. Here
  `auto`'s predictions decide it, with the cost of waiting.
"""

from collections.abc import Callable
from dataclasses import replace

from flying_lab.sim.baselines.disaggregated import Disaggregated
from flying_lab.sim.baselines.release import Draining, Operated, Thresholds
from flying_lab.sim.baselines.routers import ROUTERS, FewestInFlight
from flying_lab.sim.baselines.shift_parallel import shifting
from flying_lab.sim.baselines.transforming import KINDS, transforming
from flying_lab.sim.cluster import Cluster, Options
from flying_lab.sim.cost import Execution
from flying_lab.sim.machine import DegreeTime, Machine, Modelled
from flying_lab.sim.node import System
from flying_lab.sim.system import apart, flying
from flying_serving.errors import ConfigError
from flying_serving.policy.policies import POLICIES, ForUrgent
from flying_serving.predict.migrations import MigrationCost

FLYING = tuple(name for name, policy in POLICIES.items() if policy.decides)
PAIRS = ("split", "pd-disagg")


def names(machine: Machine) -> list[str]:
    """Return the names of all systems that this machine can run."""
    degrees = [
        f"stock-tp{degree}" for degree in machine.degrees(machine.smallest_engine) if degree > 1
    ]
    modelled = ["shift-parallel", "fork"] if isinstance(machine, Modelled) else []
    pairs = (
        machine.handoff(machine.smallest_engine) and machine.devices >= 2 * machine.smallest_engine
    )
    modelled += KINDS if modelled and len(machine.degrees(machine.smallest_engine)) > 1 else []
    return [
        *FLYING,
        "stock-dp",
        "stock-tp",
        *degrees,
        *ROUTERS,
        *(PAIRS if pairs else ()),
        *modelled,
    ]


def build(
    name: str, machine: Machine, devices: int, options: Options, execution: Execution = "graph"
) -> System:
    """Build the system of a name. `devices`: devices of an engine if the name does not give its
    degree. `execution`: of our policies' steps; `fork` is always eager, all others run graphs.

    Raises:
        ConfigError: for an unknown name, with the known ones; for a system that the machine cannot
            run.
    """
    if name not in names(machine):
        raise ConfigError(f"--policy={name!r}: not one of {', '.join(names(machine))}")
    widest = machine.degrees(devices)[-1]
    if name in FLYING:
        system = flying(machine, devices, POLICIES[name], options, execution)
    elif name == "fork":
        policy = Draining("fork", by_load=True, for_urgent=ForUrgent.ALWAYS, by_context=True)
        system = flying(machine, devices, policy, options, "eager", recomputes=True)
    elif name == "shift-parallel":
        assert isinstance(machine, Modelled)
        time = shifting(machine, devices, widest)
        system = _stock(machine, widest, options, resident=devices, time=time)
    elif name in KINDS:
        assert isinstance(machine, Modelled)
        system = transforming(machine, devices, options, name)
    elif name in PAIRS:
        system = paired(machine, devices, options, name)
    elif name.startswith("stock-tp"):
        system = _stock(machine, int(name.removeprefix("stock-tp") or widest), options)
    else:
        system = _stock(machine, devices, options)
    return replace(system, name=name, placing=ROUTERS.get(name, system.placing))


def _stock(
    machine: Machine,
    degree: int,
    options: Options,
    resident: int | None = None,
    time: DegreeTime | None = None,
) -> System:
    """Return engines that stay apart, with the rule of stock vLLM's router."""
    system = apart(machine, degree, POLICIES["static-dp"], options, resident, time)
    return replace(system, placing=FewestInFlight)


def operated(fork: System, thresholds: Thresholds) -> System:
    """Return the fork with an operator who switches by two thresholds."""
    policy = Operated(fork.settings.policy.name, by_load=True, thresholds=thresholds)
    return replace(fork, settings=replace(fork.settings, policy=policy))


def paired(machine: Machine, devices: int, options: Options, name: str) -> System:
    """One of PAIRS, with engines of `devices` devices that pull KV from each other.

    Raises:
        ConfigError: the engines are no pairs, or KV cannot be pulled.
    """
    handoff = machine.handoff(devices)
    if handoff is None or machine.devices % (2 * devices):
        raise ConfigError(
            f"--policy={name!r}: needs pairs of engines between which KV can be pulled"
        )
    if name == "split":
        return _splitting(machine, devices, options, handoff)

    def sender(cluster: Cluster, mean_outputs: Callable[[], float]) -> Disaggregated:
        return Disaggregated(cluster, handoff)

    return replace(apart(machine, devices, POLICIES["static-dp"], options), sender=sender)


def _splitting(machine: Machine, devices: int, options: Options, handoff: MigrationCost) -> System:
    """Our server with policy `split`: each engine has a lane, and pulls KV from any other one."""
    time = machine.step_time(devices, size=1)
    system = apart(machine, devices, POLICIES["split"], options, time=time)
    return replace(system, shape=replace(system.shape, migrations={1: handoff}))
