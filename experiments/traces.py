"""The workloads of the break-even and of the oracle, on Llama-3-70B."""

from __future__ import annotations

from functools import cache

from experiments.common import DATA, SEEDS
from flying_lab.workload import shape
from flying_lab.workload.model import Workload
from flying_lab.workload.read import read_workload
from flying_lab.workload.synth import Alternating, synthesise

NAMES = ("alternating", "azure code", "mooncake conversation")


def traces(names: tuple[str, ...], seed: int) -> list[str]:
    """Of these workloads those that a seed changes, and all with the first one: a recorded trace is
    what it is.
    """
    return [name for name in names if seed == SEEDS[0] or name != "azure code"]


@cache
def trace(name: str, seed: int) -> Workload:
    """One of NAMES. Mooncake's times are rounded; the seed spreads them."""
    if name == "alternating":
        shape_of = Alternating(
            requests=1200, low_s=40.0, burst_s=30.0, low_rate_rps=2.0, burst_rate_rps=9.0
        )
        return synthesise(shape_of, seed)
    if name == "azure code":
        return read_workload(DATA / "traces" / "azure_code.csv", seed)
    # no prefix cache is simulated, so all of these long prompts are computed: half as fast as
    # recorded
    return shape.scale_time(
        read_workload(DATA / "traces" / "mooncake_conversation.jsonl", seed), 2.0
    )
