"""`auto` against an oracle that knows every request to come, and tries every choice in a copy of
the simulation.

Every few seconds the oracle copies the node once for each uniform layout and way to switch, serves
the known arrivals up to a horizon in each copy without another switch, lets it drain, and takes the
choice whose requests have the least end-to-end latency in all. Such a plan is greedy, so several
are made, and each uniform layout is kept for the whole trace as well; the best of all is the
oracle's. It is still no bound for every schedule.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from experiments.common import FIRST, MAX_NUM_SEQS, Kept, Numbers, Setting, machine, run, system
from experiments.rows import Row, markdown, page, paragraph, spread, write
from experiments.traces import trace, traces
from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Options
from flying_lab.sim.fleet import LEAD_S
from flying_lab.sim.node import SimNode
from flying_lab.sim.system import flying
from flying_lab.workload.model import Request
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES

MODEL = "llama-3-70b"
PLANS = ((2.5, 10.0), (5.0, 20.0))
"""(seconds between decisions, seconds ahead). 60 s ahead was the best of three nowhere (one seed),
and slowest.
"""
WAYS = ("weave", "migrate")
NAMES = ("alternating", "azure code")
SYSTEMS = ("auto", "stock-dp", "stock-tp4", "stock-tp", "shift-parallel")


@dataclass
class World:
    """A node, its clock, and the latencies of what has ended."""

    clock: Clock
    setting: Setting = FIRST
    total_s: float = 0.0
    ended: int = 0
    node: SimNode = field(init=False)

    def __post_init__(self) -> None:
        options = Options(max_num_seqs=MAX_NUM_SEQS, keep_times=False)
        manual = flying(machine(MODEL, self.setting), 2, POLICIES["manual"], options)
        self.node = SimNode(manual, self.clock, self.over)

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


def measure(setting: Setting) -> Numbers:
    """By workload and system: mean end-to-end latency, switches, and which plan the oracle's
    was.
    """
    return {name: _measure(name, setting) for name in traces(NAMES, setting.seed)}


def _measure(name: str, setting: Setting) -> Numbers:
    workload = trace(name, setting.seed)
    mean_s, switches, plan = oracle(list(workload.requests), setting)
    found: Numbers = {"oracle": {"mean_e2e_s": mean_s, "switches": switches, "plan": plan}}
    return found | {other: measure_one(other, name, setting) for other in SYSTEMS}


def measure_one(other: str, name: str, setting: Setting) -> Numbers:
    """Mean end-to-end latency and switches of one system on one workload."""
    done = run(system(other, MODEL, setting), MODEL, trace(name, setting.seed))
    return {
        "mean_e2e_s": done.summary["mean_e2el_ms"] / 1e3,
        "switches": len(done.outcome.switches),
    }


def beside(found: Kept, name: str, system_name: str) -> list[float]:
    """Mean end-to-end latency of a system over the oracle's, of each seed."""
    runs = [one[name] for one in found.seeds if name in one]
    return [one[system_name]["mean_e2e_s"] / one["oracle"]["mean_e2e_s"] for one in runs]


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the page; it compares nothing with the paper."""
    rows, verdicts = [], []
    for name in NAMES:
        runs = [one[name] for one in found.seeds if name in one]
        for other in ("oracle", *SYSTEMS):
            ratios = beside(found, name, other)
            cells = [
                spread([one[other][key] for one in runs]) for key in ("mean_e2e_s", "switches")
            ]
            rows.append([name, other, cells[0], spread(ratios), cells[1]])
            if other == "auto":
                verdicts.append(f"On {name} `{other}` is {mean(ratios) - 1:+.0%} from the oracle.")
    plans = {one[name]["oracle"]["plan"] for one in found.seeds for name in NAMES if name in one}
    shift = " and ".join(
        f"{spread(beside(found, name, 'shift-parallel'))} on {name}" for name in NAMES
    )
    lines = [
        "Llama-3-70B on 8 H200s. The oracle tries all uniform layouts every few seconds in "
        "copies of the simulation",
        "that see the arrivals of the next seconds and all output lengths, and takes the best; "
        "of several such plans",
        "and of every uniform layout kept for good it is the best. It is greedy and its groups "
        "hold what ours do; the",
        "fixed layouts below are stock vLLM's, whose wide ones hold their weights once and so "
        "have more room for KV.",
        f"Means of {len(found.seeds)} seeds [smallest..largest], each ratio that of one seed; "
        "nothing is random in the",
        f"Azure trace. Plans that were best: {'; '.join(sorted(plans))}.",
        "",
        *paragraph(
            f"Shift Parallelism's mean end-to-end latency is {shift} of the oracle's: it divides "
            "the tokens of a large",
            "step instead of the layers, which no data or tensor parallel layout does.",
        ),
        *verdicts,
        "",
        *markdown(["trace", "system", "mean E2E (s)", "/ oracle", "switches"], rows),
    ]
    write(folder, "oracle", page("An oracle against auto", {"oracle": found}, lines))
    return []


def oracle(requests: list[Request], setting: Setting = FIRST) -> tuple[float, int, str]:
    """Mean end-to-end latency in s, switches, and which plan it was."""
    layouts = [Layout.uniform(4, size) for size in (1, 2, 4)]
    made = [
        (
            *_greedy(requests, layouts, every_s, ahead_s, setting),
            f"every {every_s:g} s, {ahead_s:g} s ahead",
        )
        for every_s, ahead_s in PLANS
    ]
    for layout in layouts:
        kept_s = _kept(World(Clock(-LEAD_S), setting), layout, requests)
        made.append((kept_s, 1, f"groups of {len(layout.groups[0])} for good"))
    return min(made)


def _greedy(
    requests: list[Request], layouts: list[Layout], every_s: float, ahead_s: float, setting: Setting
) -> tuple[float, int]:
    """One plan: decide every `every_s` seconds by the next `ahead_s`."""
    world = World(Clock(-LEAD_S), setting)
    arrivals = [request.arrival_s for request in requests]
    now_s, switches = -every_s, 0
    while world.ended < len(requests):
        ahead = requests[bisect_left(arrivals, now_s) : bisect_left(arrivals, now_s + ahead_s)]
        if ahead or world.node.open:
            tried = enumerate(_choices(world, layouts))
            _, _, layout, way = min(
                (_cost(world, layout, way, ahead), n, layout, way) for n, (layout, way) in tried
            )
            if layout != world.node.controller.state.layout:
                world.node.order(layout, way)
                switches += 1
        for request in ahead:
            if request.arrival_s < now_s + every_s:
                world.clock.at(request.arrival_s, world.node.arrive, request)
        now_s += every_s
        world.until(now_s)
    return world.total_s / world.ended, switches


def _kept(world: World, layout: Layout, requests: list[Request]) -> float:
    """Mean end-to-end latency of one layout from before the first request on."""
    if layout != world.node.controller.state.layout:
        world.node.order(layout, "weave")
    for request in requests:
        world.clock.at(request.arrival_s, world.node.arrive, request)
    while world.ended < len(requests) and world.clock.step():
        pass
    return world.total_s / world.ended


def _choices(world: World, layouts: list[Layout]) -> list[tuple[Layout, str]]:
    present = world.node.controller.state.layout
    others = [layout for layout in layouts if layout != present]
    ways = WAYS if world.node.open else WAYS[:1]
    if world.node.controller.changeover.is_under_way:
        return [(present, "weave")]
    return [(present, "weave"), *((layout, way) for layout in others for way in ways)]


def _cost(world: World, layout: Layout, way: str, ahead: list[Request]) -> float:
    """Request-seconds of the choice, in a copy."""
    tried = copy.deepcopy(world)
    before = tried.total_s
    if layout != tried.node.controller.state.layout:
        tried.node.order(layout, way)
    for request in ahead:
        tried.clock.at(request.arrival_s, tried.node.arrive, request)
    while tried.ended < world.ended + len(world.node.open) + len(ahead) and tried.clock.step():
        pass
    return tried.total_s - before
