"""Flying Serving, figure 10: what a switch costs the requests around it, by the way it is made and by load."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from matplotlib.figure import Figure

from experiments.common import PAPER, RESULTS, SEED, SLOTS, Row, machine, markdown, number, table, write
from experiments.reasons import why
from flying_serving.config import PREEMPTS
from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES
from flying_serving.sim.cluster import Clock
from flying_serving.sim.node import SimNode
from flying_serving.sim.run import Arrivals
from flying_serving.sim.system import Options, flying
from flying_serving.workload.synth import Poisson, synthesise

MODEL = "llama-3-70b"
FIRST_S, EVERY_S, SWITCHES = 20.0, 30.0, 6
RATES = (0.5, 1.0, 1.5, 3.0)
RELEASED_RPS = 1.5
"""The authors' release was measured up to this rate."""


@dataclass(frozen=True)
class Measured:
    """The worst of all switches of a run, in s; DP to TP, then TP to DP.

    `begins`: from the switch's begin until all engines work in the new layout; `drains`: until the last request of the
    old one has ended or moved.
    """

    begins: tuple[float, float]
    drains: tuple[float, float]
    gap: float
    ttft: float
    mean_e2e: float


def main() -> list[Row]:
    """Ten switches between two engines of degree 2 and one group of degree 4, as in the authors' release."""
    found = {(rate, preempt): _measured(_run(rate, preempt)) for rate in RATES for preempt in PREEMPTS}
    rows = why("fig10", MODEL, _rows({key: one for key, one in found.items() if key[0] <= RELEASED_RPS}))
    headings = ["requests/s", "preempt", "DP to TP: begins (s)", "drains (s)", "TP to DP: begins (s)", "drains (s)"]
    headings += ["token gap (s)", "TTFT (s)", "mean E2E (s)"]
    shown = [
        [f"{rate:g}", preempt, *(number(v) for both in zip(one.begins, one.drains, strict=True) for v in both),
         number(one.gap), number(one.ttft), number(one.mean_e2e)]
        for (rate, preempt), one in found.items()
    ]  # fmt: skip
    lines = [
        "Llama-3-70B on 4 H200s, 4,096 prompt and 256 output tokens, Poisson, as in the authors' release: an operator",
        f"binds both engines and parts them again, {SWITCHES} switches, one every {EVERY_S:g} s. Each number but the",
        "mean is the worst of a run. *Begins*: until all engines work in the new layout, after the step under way and,",
        "with `sequential` and `soft`, after the old requests. *Drains*: until the last request of the old layout has",
        "ended or moved. What the release calls drain ends with its first step in the new layout: it is compared with",
        "*begins*.",
        "",
        *table(rows),
        *markdown(headings, shown),
        "![worst gap between two tokens](fig10.png)",
    ]
    _figure({key: one.gap for key, one in found.items()})
    write("fig10", "Flying Serving, figure 10: switching", lines)
    return [row.of(MODEL) for row in rows]


def _rows(found: dict[tuple[float, str], Measured]) -> list[Row]:
    rows = []
    for preempt in ("move", "weave"):
        runs = [one for (_, way), one in found.items() if way == preempt]
        for n, direction in enumerate(("DP to TP", "TP to DP")):
            published = PAPER["release"][("drain_to_tp_s", "drain_to_dp_s")[n]]
            begins = max(one.begins[n] for one in runs)
            rows.append(Row(f"{preempt}: {direction}, new layout begins after (s)", published, begins, higher=False))
        gap = max(one.gap for one in runs)
        rows.append(Row(f"{preempt}: longest gap between two tokens (s)", PAPER["release"]["gap_s"], gap, higher=False))
    return rows


def _run(rate: float, preempt: str) -> SimNode:
    clock = Clock()
    node = flying(machine(MODEL, "h200x4"), 2, POLICIES["manual"], Options(slots=SLOTS)).node(clock)
    end_s = FIRST_S + SWITCHES * EVERY_S
    shape = Poisson(duration_s=end_s, rate_rps=rate, prompt_tokens=(4096, 4096), output_tokens=(256, 256))
    Arrivals(synthesise(shape, SEED).requests, clock, node.arrive)
    for n in range(SWITCHES):
        clock.at(FIRST_S + n * EVERY_S, _order, node, Layout.uniform(2, 1 if n % 2 else 2), preempt)
    while clock.step():
        pass
    return node


def _order(node: SimNode, layout: Layout, preempt: str) -> None:
    """As an operator, who tries again while another switch is under way."""
    if node.controller.changing:
        node.clock.after(0.1, _order, node, layout, preempt)
    elif layout != node.controller.layout:
        node.order(layout, preempt)


def _measured(node: SimNode) -> Measured:
    wide, apart = ([s for s in node.outcome.switches if len(s.new.groups) == count] for count in (1, 2))
    ended = node.outcome.ended
    return Measured(
        (_begins_s(wide), _begins_s(apart)),
        (_drains_s(wide), _drains_s(apart)),
        max(later - earlier for r in ended for earlier, later in pairwise(r.token_s or ())),
        max(r.first_token_s - r.arrival_s for r in ended),
        sum(r.end_s - r.arrival_s for r in ended) / len(ended),
    )


def _begins_s(switches: list[Switch]) -> float:
    return max(s.waited_for_idle_ms + (s.cutover_ms or 0.0) for s in switches) / 1e3


def _drains_s(switches: list[Switch]) -> float:
    return max(s.waited_for_idle_ms + (s.drain_ms or 0.0) for s in switches) / 1e3


def _figure(gaps: dict[tuple[float, str], float]) -> None:
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axis = figure.subplots()
    for preempt in PREEMPTS:
        axis.plot(RATES, [gaps[rate, preempt] for rate in RATES], marker="o", label=preempt)
    axis.set(xlabel="requests/s", ylabel="longest gap between two tokens (s)", yscale="log")
    axis.legend(fontsize="small")
    figure.savefig(RESULTS / "fig10.png", dpi=110)
