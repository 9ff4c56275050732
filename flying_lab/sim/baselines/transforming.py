"""Servers whose engines join and part by policy `gyges`, in other ways than the product's.

By name:

- `gyges-paper`: a group is tensor parallel, of at most four engines. Its KV memory is the engines',
  and that of the feed-forward weights. It is made in place, beside steps.
- `gyges-stopped`: as `gyges-paper`, but engines are stopped while a group is made.
- `gyges-round-robin`, `gyges-least-load`: as `gyges-paper`, with a router that does not know of
  groups (`baselines/unaware.py`).
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

from flying_lab.sim.baselines.parallelisms import pipelined
from flying_lab.sim.baselines.unaware import LeastLoad, RoundRobin
from flying_lab.sim.cluster import Options
from flying_lab.sim.loans import Loan
from flying_lab.sim.machine import DegreeTime, Modelled
from flying_lab.sim.memory import Lent
from flying_lab.sim.node import System
from flying_lab.sim.system import system_of
from flying_lab.sim.token_parallel import sequence_parallel
from flying_lab.sim.transformation import Transformation, Work
from flying_serving.controller.group_choice import GroupChoice
from flying_serving.errors import ConfigError
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.migrations import MigrationCost

WIDEST = 4
"""The most engines of a group: the paper's groups have degree 4."""
MANY_TOKENS = 1000.0
"""Tokens by which the time of each is found."""


@dataclass(frozen=True)
class _Way:
    """A way to make a group, and to part it.

    `kv_s`: seconds in which engines do nothing else, for KV of some tokens of one engine.
    `weights`: the work to lend weights, and to get them back.
    `pieces`: in which they go and come. Between two pieces engines step, as in the product.
    """

    kv_s: Callable[[Transformation, float], float]
    weights: Callable[[Transformation, Lent], tuple[Work, Work]]
    pieces: int

    def loan(self, work: Transformation, lent: Lent, blocks: int) -> Loan | None:
        """Return the loan of weights that an engine makes, None if it lends none. `blocks`: the KV
        blocks that it gets.
        """
        if not blocks:
            return None
        count = self.pieces
        lend_s, fetch_s = (work.apart_s(one) / count for one in self.weights(work, lent))
        room = tuple(blocks * piece // count for piece in range(count + 1))
        return Loan(room, (lend_s,) * count, (fetch_s,) * count)


def _in_place(work: Transformation, lent: Lent) -> tuple[Work, Work]:
    return work.lend(), work.give_back(lent)


def _through_host(work: Transformation, lent: Lent) -> tuple[Work, Work]:
    return work.through_host(0.0, work.degree), work.through_host(0.0, work.engine)


def _kv_through_host_s(work: Transformation, tokens: float) -> float:
    weights, all_of_it = (work.through_host(count, work.degree) for count in (0.0, tokens))
    return work.apart_s(all_of_it) - work.apart_s(weights)


BESIDE = _Way(lambda work, tokens: work.taken_s(work.kv(tokens)), _in_place, pieces=64)
STOPPED = _Way(lambda work, tokens: work.apart_s(work.kv(tokens)), _in_place, pieces=1)
THROUGH_HOST = _Way(_kv_through_host_s, _through_host, pieces=1)
AT_ONCE = _Way(lambda work, tokens: 0.0, _in_place, pieces=1)


@dataclass(frozen=True)
class _Kind:
    """A kind of group: its steps, the weights that it lends, how it is made, and how groups are
    chosen for requests; None: as the product does.
    """

    parallel: Callable[[Modelled, int, int], DegreeTime]
    lent: Lent
    way: _Way
    placing: type[GroupChoice] | None = None


def _tensor(machine: Modelled, devices: int, size: int) -> DegreeTime:
    return machine.step_time(devices * size)


def _sequence(machine: Modelled, devices: int, size: int) -> DegreeTime:
    return sequence_parallel(machine.model, machine.kind.hardware, devices, devices * size)


def _serial(machine: Modelled, devices: int, size: int) -> DegreeTime:
    """Return the step times of a group of which one engine works at a time.

    Gyges' section 2 says that of pipelines and sequence parallelism.
    """
    return machine.step_time(devices)


KINDS = {
    "gyges-paper": _Kind(_tensor, "mlp", BESIDE),
    "gyges-stopped": _Kind(_tensor, "mlp", STOPPED),
    "gyges-round-robin": _Kind(_tensor, "mlp", BESIDE, RoundRobin),
    "gyges-least-load": _Kind(_tensor, "mlp", BESIDE, LeastLoad),
    "seesaw": _Kind(_tensor, "all", THROUGH_HOST),
    "kunserve": _Kind(pipelined, "all", BESIDE),
    "loongserve": _Kind(_sequence, "nothing", AT_ONCE),
    "kunserve-serial": _Kind(_serial, "all", BESIDE),
    "loongserve-serial": _Kind(_serial, "nothing", AT_ONCE),
}
"""The kinds of servers, by the name of the system."""


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
    engine = machine.engine(devices, (1, size), devices)
    times = {1: machine.step_time(devices), size: kind.parallel(machine, devices, size)}
    # a router that knows of no groups asks for one at any cost
    policy = replace(POLICIES["gyges"], has_price=kind.placing is None)
    system = system_of(machine, policy, options, engine, times)

    blocks = machine.lent_blocks(devices, size, kind.lent)
    work = Transformation(machine.model, machine.kind.hardware, devices, devices * size)
    cost = MigrationCost(0.0, kind.way.kv_s(work, MANY_TOKENS) / MANY_TOKENS)

    capacity, shape = system.settings.capacity, system.shape
    lent_tokens = capacity.kv_tokens[size] + blocks * engine.block_tokens[size] if blocks else 0
    settings = replace(system.settings, capacity=replace(capacity, lent_tokens=lent_tokens))
    if kind.placing is not None:  # a router of its own queues nothing
        settings = replace(settings, limits=replace(settings.limits, capped=False))
    loan = kind.way.loan(work, kind.lent, blocks)
    shape = replace(shape, migrations={1: cost, size: cost}, loan=loan)
    return replace(system, name=name, settings=settings, shape=shape, placing=kind.placing)
