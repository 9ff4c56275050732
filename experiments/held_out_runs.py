"""The runs of docs/lab/results/held_out.md: `auto`, the fixed layouts of our server and of stock
vLLM, and Shift Parallelism on every load; and the values of the constants that decided.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence

from experiments.common import MODELS, Numbers, Setting, run
from experiments.constants import CONSTANTS, Constant
from experiments.held_out_load import LOADS, workload
from experiments.phases_load import Span
from experiments.phases_runs import layout_name, layout_shares, systems
from experiments.servers import GRAPHS, PRODUCT, SERVERS
from flying_lab.sim.node import System
from flying_lab.workload.model import Workload

OURS = (PRODUCT, GRAPHS)
SHIFT = "shift-parallel"
MEANS = ("ttft", "tpot", "e2el")
SETTLE_S = 30.0
"""Seconds after the begin of a load in which switches do not count: it is a change of load."""
OTHERS = (
    Constant("FIRST_TOKEN_WEIGHT", "power", "of first tokens in the figure", "policy.ranking"),
    Constant("SETTLE_S", "s", "from a switch for load to the next", "controller.switches"),
    Constant("BEYOND", "times", "of what a request has that outlasts others", "predict.lifetimes"),
    Constant("INTERVALS_PER_DOUBLING", "", "of the table of lengths", "predict.lifetimes"),
    Constant("HOLDS_S", "s", "that a forecast counts if none follows", "policy.regret"),
    Constant("RECENT_S", "s", "in which switches raise the doubt", "controller.switches"),
    Constant("TOGETHER_S", "s", "between requests of one event", "predict.events"),
    Constant("MEMORY_EVENTS", "events", "over which sizes are averaged", "predict.events"),
)
"""Constants that experiments/ablation.py does not scale."""


def measure(setting: Setting) -> Numbers:
    """By model, server and load: figures of each system. Beside them the constants' values."""
    found: Numbers = {"constants": constants()}
    for model in MODELS:
        found[model] = {server: {} for server in SERVERS}
        for load in LOADS:
            work = workload(load, model, setting.seed)
            for server in SERVERS:
                found[model][server][load.name] = {
                    one.name: measure_system(one, model, work)
                    for one in compared(server, model, setting)
                }
    return found


def compared(server: str, model: str, setting: Setting) -> Iterator[System]:
    """Yield the systems of a server that the page compares: those of docs/lab/results/phases.md
    without the fork, which is eager and hardly switches there.
    """
    return (one for one in systems(server, model, setting) if one.name != "fork")


def constants() -> Numbers:
    """Return the value of each constant by its name."""
    return {
        one.name: getattr(importlib.import_module(f"flying_serving.{one.module}"), one.name)
        for one in (*CONSTANTS, *OTHERS)
    }


def measure_system(one: System, model: str, work: Workload) -> Numbers:
    """Serve a load with one system: its means, and how `auto` switched."""
    done = run(one, model, work)
    found: Numbers = {
        "requests": len(work.requests),
        "refused": len(done.outcome.refused),
        **{f"mean_{name}_ms": _rounded(done.summary[f"mean_{name}_ms"]) for name in MEANS},
    }
    if one.name != "auto":
        return found
    devices = one.settings.capacity.devices
    whole = [Span("all", 0.0, work.duration_s)]
    rows = [
        {
            "at_s": round(switch.decided_s, 1),
            "from": layout_name(switch.old, devices),
            "to": layout_name(switch.new, devices),
            "mode": switch.mode,
        }
        for switch in done.outcome.switches
        if 0.0 <= switch.decided_s <= work.duration_s
    ]
    return found | {
        "switches": rows,
        "per_minute": _rounded(per_minute([row["at_s"] for row in rows], work.duration_s)),
        "layouts": layout_shares(done.outcome.layouts, whole, devices)["all"],
    }


def per_minute(decided_s: Sequence[float], duration_s: float) -> float:
    """Return the switches in a minute, from SETTLE_S on."""
    counted = sum(SETTLE_S <= at_s <= duration_s for at_s in decided_s)
    return counted * 60.0 / (duration_s - SETTLE_S)


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
