"""`auto` against an oracle that knows every request to come, and tries every choice in a copy of the simulation.

Every EPOCH_S seconds the oracle copies the node once for each uniform layout and way to switch, serves the known
arrivals of the next HORIZON_S seconds in each copy without another switch, lets it drain, and takes the choice whose
requests have the least end-to-end latency in all. It is greedy: a bound for rules that look so far ahead with no
mistake in the forecast, not for every schedule.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from dataclasses import dataclass, field

from experiments.common import Row, machine, markdown, number, run, write
from experiments.traces import trace
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES
from flying_serving.sim.cluster import Clock
from flying_serving.sim.node import SimNode
from flying_serving.sim.run import LEAD_S
from flying_serving.sim.system import Options, flying
from flying_serving.workload.model import Request

MODEL = "llama-3-70b"
EPOCH_S, HORIZON_S = 5.0, 20.0
WAYS = ("weave", "recompute")
NAMES = ("alternating", "azure code")


@dataclass
class World:
    """A node, its clock, and the latencies of what has ended."""

    clock: Clock
    total_s: float = 0.0
    ended: int = 0
    node: SimNode = field(init=False)

    def __post_init__(self) -> None:
        system = flying(machine(MODEL), 2, POLICIES["manual"], Options(keep_times=False))
        self.node = system.node(self.clock, self.over)

    def over(self, request) -> None:  # type: ignore[no-untyped-def]
        """A request has ended."""
        self.total_s += request.end_s - request.arrival_s
        self.ended += 1

    def until(self, time_s: float) -> None:
        """Let time pass."""
        self.clock.at(time_s, _nothing)
        while self.clock.now_s < time_s and self.clock.step():
            pass


def _nothing() -> None:
    pass


def main() -> list[Row]:
    """Mean end-to-end latency of the oracle, of `auto` and of the static layouts."""
    rows = []
    for name in NAMES:
        mean_s, switches = oracle(list(trace(name).requests))
        rows.append([name, "oracle", number(mean_s), "1", str(switches)])
        for other in ("auto", "static-dp", "static-tp4", "static-tp", "shift-parallel"):
            done = run(other, MODEL, trace(name))
            ours = done.summary["mean_e2el_ms"] / 1e3
            rows.append([name, other, number(ours), f"{ours / mean_s:.2f}", str(len(done.outcome.switches))])
    lines = [
        f"Llama-3-70B on 8 H200s. The oracle tries all uniform layouts every {EPOCH_S:g} s in copies of the simulation",
        f"that see the next {HORIZON_S:g} s of arrivals and all output lengths, and takes the best. It is greedy and",
        "its groups hold what ours do; the static layouts are stock vLLM's, whose wide ones hold their weights once",
        "and so have more room for KV.",
        "",
        *markdown(["trace", "system", "mean E2E (s)", "/ oracle", "switches"], rows),
    ]
    write("oracle", "An oracle against auto", lines)
    return []


def oracle(requests: list[Request]) -> tuple[float, int]:
    """Mean end-to-end latency in s, and switches."""
    world = World(Clock(-LEAD_S))
    arrivals = [request.arrival_s for request in requests]
    layouts = [Layout.uniform(4, size) for size in (1, 2, 4)]
    now_s, switches = -EPOCH_S, 0
    while world.ended < len(requests):
        upto = bisect_left(arrivals, now_s + HORIZON_S)
        ahead = requests[bisect_left(arrivals, now_s) : upto]
        if ahead or world.node.open:
            tried = enumerate(_choices(world, layouts))
            best = min((_cost(world, layout, way, ahead), n, layout, way) for n, (layout, way) in tried)
            if best[2] != world.node.controller.layout:
                world.node.order(best[2], best[3])
                switches += 1
        for request in ahead:
            if request.arrival_s < now_s + EPOCH_S:
                world.clock.at(request.arrival_s, world.node.arrive, request)
        now_s += EPOCH_S
        world.until(now_s)
    return world.total_s / world.ended, switches


def _choices(world: World, layouts: list[Layout]) -> list[tuple[Layout, str]]:
    present = world.node.controller.layout
    others = [layout for layout in layouts if layout != present]
    ways = WAYS if world.node.open else WAYS[:1]
    if world.node.controller.changing:
        return [(present, "weave")]
    return [(present, "weave"), *((layout, way) for layout in others for way in ways)]


def _cost(world: World, layout: Layout, way: str, ahead: list[Request]) -> float:
    """Request-seconds of the choice, in a copy."""
    tried = copy.deepcopy(world)
    before = tried.total_s
    if layout != tried.node.controller.layout:
        tried.node.order(layout, way)
    for request in ahead:
        tried.clock.at(request.arrival_s, tried.node.arrive, request)
    while (tried.node.open or tried.clock.now_s < HORIZON_S / 2) and tried.clock.step():
        if not tried.node.open and tried.ended >= world.ended + len(world.node.open) + len(ahead):
            break
    return tried.total_s - before
