"""What a switch costs the requests around it, by the way it is made and by load, beside the
authors' release.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from experiments.common import MAX_NUM_SEQS, PAPER, Kept, Numbers, Setting, machine, template
from experiments.reasons import why
from experiments.rows import (
    Row,
    by_construction,
    markdown,
    number,
    page,
    paragraph,
    row,
    spread,
    table,
    write,
)
from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Options
from flying_lab.sim.cost import Execution
from flying_lab.sim.fleet import feed
from flying_lab.sim.node import SimNode, System
from flying_lab.sim.system import flying
from flying_lab.workload.synth import Poisson, synthesise
from flying_serving.config import MODES
from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES

MODEL = "llama-3-70b"
FIRST_S, EVERY_S, SWITCHES = 20.0, 30.0, 6
RATES = (0.5, 1.0, 1.5, 3.0)
RELEASED_RPS = 1.5
"""The authors' release was measured up to this rate."""
RELEASED = tuple(rate for rate in RATES if rate <= RELEASED_RPS)
FORK = "fork"
"""Under which the numbers of the simulated release are kept."""
DRAINS = {"DP to TP": "drain_to_tp_s", "TP to DP": "drain_to_dp_s"}
COUNTED = "migrate"
"""The way that `auto` takes nearly always; the others are shown and not counted."""
MESSAGE = by_construction(
    "an operator orders the switch, and it is modelled as the rest of the step under way and a "
    "message; the release "
    "drains first"
)


def measure(setting: Setting) -> Numbers:
    """By rate and way: switches between two engines of degree 2 and one group of degree 4, as in
    the release; then those of the simulated release.
    """
    ours = {
        run_name(rate, mode): measure_one(rate, mode, setting) for rate in RATES for mode in MODES
    }
    released = {run_name(rate, FORK): measure_fork(rate, setting) for rate in RELEASED}
    return ours | released


def run_name(rate: float, mode: str) -> str:
    """Under which the numbers of one rate and way are kept."""
    return f"{rate:g} {mode}"


def measure_one(rate: float, mode: str, setting: Setting) -> Numbers:
    """The numbers of one rate and way."""
    return _measured(_run(_server(setting), rate, mode, setting))


def measure_fork(rate: float, setting: Setting) -> Numbers:
    """The numbers of the simulated release at one rate: eager, waiting for old requests."""
    return _measured(_run(_server(setting, "eager", recomputes=True), rate, "sequential", setting))


def _server(
    setting: Setting, execution: Execution = "graph", *, recomputes: bool = False
) -> System:
    """A server on the release's four devices whose operator orders all switches."""
    where, options = machine(MODEL, setting, "h200x4"), Options(max_num_seqs=MAX_NUM_SEQS)
    return flying(where, 2, POLICIES["manual"], options, execution, recomputes=recomputes)


def _run(server: System, rate: float, mode: str, setting: Setting) -> SimNode:
    clock = Clock()
    node = SimNode(server, clock)
    end_s = FIRST_S + SWITCHES * EVERY_S
    shape = Poisson(
        duration_s=end_s, rate_rps=rate, prompt_tokens=(4096, 4096), output_tokens=(256, 256)
    )
    feed(synthesise(shape, setting.seed).requests, clock, node.arrive)
    for n in range(SWITCHES):
        clock.at(FIRST_S + n * EVERY_S, _order, node, Layout.uniform(2, 1 if n % 2 else 2), mode)
    while clock.step():
        pass
    return node


def _order(node: SimNode, layout: Layout, mode: str) -> None:
    """As an operator, who tries again while another switch is under way."""
    if node.controller.changeover.is_under_way:
        node.clock.after(0.1, _order, node, layout, mode)
    elif layout != node.controller.state.layout:
        node.order(layout, mode)


def _measured(node: SimNode) -> Numbers:
    """The worst of all switches of a run, in s; DP to TP, then TP to DP.

    `begins`: from the switch's begin until all engines work in the new layout; `drains`: until the
    last request of the old one has ended or moved.
    """
    wide, apart = (
        [s for s in node.outcome.switches if len(s.new.groups) == count] for count in (1, 2)
    )
    ended = node.outcome.ended
    return {
        "begins": [_begins_s(wide), _begins_s(apart)],
        "drains": [_drains_s(wide), _drains_s(apart)],
        "gap": max(later - earlier for r in ended for earlier, later in pairwise(r.token_s or ())),
        "ttft": max(r.first_token_s - r.arrival_s for r in ended),
        "mean_e2e": mean(r.end_s - r.arrival_s for r in ended),
    }


def _begins_s(switches: list[Switch]) -> float:
    return max(s.waited_for_idle_ms + (s.cutover_ms or 0.0) for s in switches) / 1e3


def _drains_s(switches: list[Switch]) -> float:
    return max(s.waited_for_idle_ms + (s.drain_ms or 0.0) for s in switches) / 1e3


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the page and its figure; what is compared."""
    rows = why("release_switches", MODEL, _rows(found))
    headings = [
        "requests/s",
        "mode",
        "DP to TP: begins (s)",
        "drains (s)",
        "TP to DP: begins (s)",
        "drains (s)",
    ]
    headings += ["token gap (s)", "TTFT (s)", "mean E2E (s)"]
    lines = [
        *paragraph(
            template(
                "release_switches",
                switches=SWITCHES,
                every_s=f"{EVERY_S:g}",
                seeds=len(found.seeds),
            )
        ),
        *table(rows, "release"),
        *markdown(headings, [_shown(rate, mode, found) for rate in RATES for mode in MODES]),
        *_validation(found),
        "![worst gap between two tokens, mean of the seeds](release_switches.png)",
    ]
    _figure(found, folder / "release_switches.png")
    write(
        folder,
        "release_switches",
        page("Switching, beside the authors' release", {"release_switches": found}, lines),
    )
    return [one.of(MODEL) for one in rows]


def _shown(rate: float, mode: str, found: Kept) -> list[str]:
    runs = [one[run_name(rate, mode)] for one in found.seeds]
    both = [spread([run[key][n] for run in runs]) for n in (0, 1) for key in ("begins", "drains")]
    return [
        f"{rate:g}",
        mode,
        *both,
        *(spread([run[key] for run in runs]) for key in ("gap", "ttft", "mean_e2e")),
    ]


def _rows(found: Kept) -> list[Row]:
    release, rows = PAPER["release"], []
    for mode in ("migrate", "weave"):
        keys = [run_name(rate, mode) for rate in RELEASED]

        def begins(one: Numbers, n: int, keys: list[str] = keys) -> float:
            return float(max(one[key]["begins"][n] for key in keys))

        def gap(one: Numbers, keys: list[str] = keys) -> float:
            return float(max(one[key]["gap"] for key in keys))

        counts = mode == COUNTED
        rows += [
            row(f"{mode}: {direction}, new layout begins after (s)", release[key], found,
                lambda one, n=n, begins=begins: begins(one, n), False, MESSAGE).counted(counts)  # type: ignore[misc]
            for n, (direction, key) in enumerate(DRAINS.items())
        ]  # fmt: skip
        name = f"{mode}: longest gap between two tokens (s)"
        rows.append(row(name, release["gap_s"], found, gap, False).counted(counts))
    return rows


def _validation(found: Kept) -> list[str]:
    """The drains of the simulated release beside the published ones."""
    names = [run_name(rate, FORK) for rate in RELEASED]
    rows = []
    for n, (direction, figure) in enumerate(DRAINS.items()):
        published_s = PAPER["release"][figure]
        for rate, name in zip(RELEASED, names, strict=True):
            drains = [one[name]["drains"][n] for one in found.seeds]
            ratio = f"{mean(drains) / published_s:.1f}"
            rows.append([direction, f"{rate:g}", number(published_s), spread(drains), ratio])
    headings = ["switch", "requests/s", "release, at most (s)", "simulated release (s)", "ratio"]
    return [
        "## Drains of the simulated release",
        "",
        *paragraph(template("release_drains")),
        *markdown(headings, rows),
    ]


def _figure(found: Kept, path: Path) -> None:
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axis = figure.subplots()
    for mode in MODES:
        gaps = [mean(one[run_name(rate, mode)]["gap"] for one in found.seeds) for rate in RATES]
        axis.plot(RATES, gaps, marker="o", label=mode)
    axis.set(xlabel="requests/s", ylabel="longest gap between two tokens (s)", yscale="log")
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
