"""The runs of docs/lab/results/phases.md: three servers with every fixed layout, and what each
gives its clients in each phase of the load.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from experiments import servers
from experiments.common import Numbers, Setting, run
from experiments.phases_load import OPTIONS, PHASES, Span
from flying_lab.sim.node import System
from flying_lab.sim.outcome import LayoutChange, Outcome
from flying_lab.sim.requests import SimRequest
from flying_lab.workload.model import Workload
from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES

FIGURES = tuple(
    f"{statistic}_{name}_ms"
    for name in ("ttft", "tpot", "e2el", "queue_time")
    for statistic in ("mean", "p90")
)
_DIGITS = 5


def systems(server: str, model: str, setting: Setting) -> Iterator[System]:
    """Yield the systems of a server, the fixed layouts last."""
    devices, *wider = servers.degrees(model, setting)
    if server == servers.STOCK:
        for name in ("fork", "shift-parallel", "stock-dp"):
            yield servers.stock(name, model, setting, OPTIONS)
        for degree in wider:
            yield servers.stock(f"stock-tp{degree}", model, setting, OPTIONS)
        return
    fixed = [servers.static(degree, devices) for degree in (devices, *wider)]
    for policy in (POLICIES["auto"], *fixed):
        yield servers.ours(server, policy, model, setting, OPTIONS)


def measure_system(one: System, model: str, workload: Workload, phases: Sequence[Span]) -> Numbers:
    """Serve the load with one system: its figures by phase, its switches, and its layouts."""
    done = run(one, model, workload)
    devices = one.settings.capacity.devices
    return {
        "phases": by_phase(done.summary, done.outcome, workload),
        "refused": len(done.outcome.refused),
        "layouts": layout_shares(done.outcome.layouts, phases, devices),
        "switches": [switch_row(switch, phases, devices) for switch in done.outcome.switches],
    }


def by_phase(summary: dict[str, Any], outcome: Outcome, workload: Workload) -> Numbers:
    """Return FIGURES of the requests that arrived in each phase, and how many were in flight
    then.
    """
    in_flight = _in_flight(outcome.ended)
    found = {}
    for phase in PHASES:
        there = [str(one.index) for one in workload.requests if one.phase == phase]
        figures = summary["phases"][phase]
        found[phase] = {
            "requests": len(there),
            "in_flight": median(in_flight[name] for name in there if name in in_flight),
            **{figure: _rounded(figures[figure]) for figure in FIGURES},
        }
    return found


def _in_flight(ended: Sequence[SimRequest]) -> dict[str, int]:
    """Return how many requests were under way when each one arrived, itself included."""
    arrivals = sorted(one.arrival_s for one in ended)
    ends = sorted(one.end_s for one in ended)
    return {
        one.request_id: bisect_right(arrivals, one.arrival_s) - bisect_right(ends, one.arrival_s)
        for one in ended
    }


def layout_shares(
    layouts: Sequence[LayoutChange], phases: Sequence[Span], devices: int
) -> dict[str, dict[str, float]]:
    """Return the share of each phase's time that each layout had, by phase and layout."""
    last = LayoutChange(phases[-1].end_s, layouts[-1].layout)
    seconds: dict[str, dict[str, float]] = {span.phase: defaultdict(float) for span in phases}
    for change, following in pairwise([*layouts, last]):
        for span in phases:
            inside_s = min(following.at_s, span.end_s) - max(change.at_s, span.start_s)
            if inside_s > 0:
                seconds[span.phase][layout_name(change.layout, devices)] += inside_s
    return {
        phase: {name: _rounded(part_s / sum(parts.values())) for name, part_s in parts.items()}
        for phase, parts in seconds.items()
    }


def layout_name(layout: Layout, devices: int) -> str:
    """Return the degrees of a layout's groups: "4 x TP2", "2 x TP2 + 1 x TP4"."""
    sizes = sorted(set(layout.shape))
    return " + ".join(f"{layout.shape.count(size)} x TP{size * devices}" for size in sizes)


def switch_row(switch: Switch, phases: Sequence[Span], devices: int) -> Numbers:
    """Return a switch: when, to which layout, how, and the forecasts that made it."""
    at_s = switch.decided_s
    span = next((one for one in phases if one.start_s <= at_s < one.end_s), None)
    row: Numbers = {
        "at_s": round(at_s, 1),
        "phase": span.phase if span else "before" if at_s < 0 else "end",
        "into_phase_s": round(at_s - span.start_s, 1) if span else None,
        "from": layout_name(switch.old, devices),
        "to": layout_name(switch.new, devices),
        "mode": switch.mode,
        "in_flight": switch.requests_in_flight,
        "waited_s": round(switch.waited_for_idle_ms / 1e3, 2),
        "drain_s": None if switch.drain_ms is None else round(switch.drain_ms / 1e3, 2),
    }
    if (decision := switch.decision) is not None:
        row |= {
            "reason": decision.reason,
            "stay": None if decision.stay is None else _rounded(decision.stay),
            "gain": _rounded(decision.gain) if decision.gain < math.inf else None,
            "cost": _rounded(decision.cost),
            "needed": None if decision.least_gain is None else _rounded(decision.least_gain),
        }
    return row


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
