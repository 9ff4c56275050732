"""The servers that pages simulate on the paper's machine: ours as the product runs, ours with
CUDA graphs, and stock vLLM. Clients send the same generous `max_tokens` to all of them.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.common import Setting, machine, unbounded
from flying_lab.sim.catalog import build
from flying_lab.sim.cluster import Options
from flying_lab.sim.cost import Execution
from flying_lab.sim.machine import Modelled
from flying_lab.sim.node import System
from flying_lab.sim.system import flying
from flying_serving.policy.policies import Policy

MAX_TOKENS = 2048
"""That clients send with each request: four times the longest output."""
PRODUCT, GRAPHS, STOCK = "as the product runs", "with graphs", "stock vLLM"
SERVERS = (PRODUCT, GRAPHS, STOCK)


def ours(
    server: str,
    policy: Policy,
    model: str,
    setting: Setting,
    options: Options,
    *,
    host_share: float = 1.0,
) -> System:
    """Return our server with a policy, engines as small as possible.

    Args:
        server: PRODUCT (eager, NCCL for messages of every size) or GRAPHS.
        policy, model, setting, options: of the run.
        host_share: of the host's work that counts.
    """
    where = replace(machine(model, setting), host_share=host_share)
    execution: Execution = "graph"
    if server == PRODUCT:
        where, execution = _without_custom_all_reduce(where), "eager"
    return _asked(flying(where, where.smallest_engine, policy, options, execution))


def stock(name: str, model: str, setting: Setting, options: Options) -> System:
    """Return a system of the catalog: stock vLLM at one degree, or one that we compare with."""
    where = machine(model, setting)
    return _asked(build(name, where, where.smallest_engine, options))


def degrees(model: str, setting: Setting) -> list[int]:
    """Return the degrees that the machine's engines and groups can have, the smallest first."""
    where = machine(model, setting)
    return where.degrees(where.smallest_engine)


def is_fixed(name: str) -> bool:
    """Whether a system keeps one layout for good."""
    return name.startswith(("static-", "stock-"))


def static(degree: int, devices: int) -> Policy:
    """Return our server's policy that keeps all groups at one degree.

    `devices`: of one engine.
    """
    name = f"static-tp{degree}" if degree > devices else "static-dp"
    return Policy(name, pinned_size=lambda sizes: degree // devices)


def _asked(one: System) -> System:
    """Return a system that refuses no request, and whose clients send MAX_TOKENS."""
    return replace(unbounded(one), max_tokens=_generous)


def _generous(output_tokens: int) -> int:
    return MAX_TOKENS


def _without_custom_all_reduce(where: Modelled) -> Modelled:
    """Return the machine whose groups have NCCL for messages of every size, as the product's."""
    hardware = where.kind.hardware
    nccl = {
        ranks: lines.model_copy(update={"small": lines.large})
        for ranks, lines in hardware.all_reduce.items()
    }
    hardware = hardware.model_copy(update={"all_reduce": nccl})
    return replace(where, kind=replace(where.kind, hardware=hardware))
