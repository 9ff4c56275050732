"""Flying Serving, figure 10: what a switch costs the requests around it, by the way it is made and by load."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from matplotlib.figure import Figure

from experiments.common import RESULTS, SEED, machine, markdown, number, write
from flying_serving.config import PREEMPTS
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES
from flying_serving.sim.cluster import Clock
from flying_serving.sim.node import SimNode
from flying_serving.sim.run import Arrivals
from flying_serving.sim.system import Options, flying
from flying_serving.workload.synth import Poisson, synthesise

MODEL = "llama-3-70b"
AT_S, BACK_S = 30.0, 60.0
RATES = (0.5, 1.0, 1.5, 3.0)


def main() -> None:
    """DP to TP at 30 s and back at 60 s, under the load of the authors' release and twice its highest."""
    rows, gaps = [], {}
    for rate in RATES:
        for preempt in PREEMPTS:
            node = _run(rate, preempt)
            drains = [switch.drain_ms or 0.0 for switch in node.outcome.switches]
            waits = [switch.waited_for_idle_ms for switch in node.outcome.switches]
            gaps[rate, preempt] = _worst_gap_s(node)
            ttft = [r.first_token_s - r.arrival_s for r in node.outcome.ended if AT_S - 2 < r.arrival_s < BACK_S + 10]
            e2e = [r.end_s - r.arrival_s for r in node.outcome.ended]
            rows.append(
                [f"{rate:g}", preempt, number(waits[0] / 1e3), number(drains[0] / 1e3), number(waits[1] / 1e3),
                 number(drains[1] / 1e3), number(gaps[rate, preempt]), number(max(ttft)), number(sum(e2e) / len(e2e))]
            )  # fmt: skip
    headings = ["requests/s", "preempt", "DP to TP: waits (s)", "drain (s)", "TP to DP: waits (s)", "drain (s)",
                "worst token gap (s)", "worst TTFT (s)", "mean E2E (s)"]  # fmt: skip
    lines = [
        "Llama-3-70B on 8 H200s, 4,096 prompt and 256 output tokens, Poisson: an operator binds all four engines at",
        "30 s and parts them at 60 s. *Waits*: until the engines are told, since old requests have to end first.",
        "*Drain*: from then until the last request of the old layout has ended. The authors' release reports, on four",
        "H200s with at most 1.5 requests/s, drains of 0.02 to 0.39 s with short prompts and of up to 1.04 s (DP to TP)",
        "and 3.1 s (TP to DP) with these prompts, and a worst gap in a stream of 0.43 s, once 1.06 s. Its drain ends",
        "with the prefill that is under way, since paused requests are computed again; ours, of `sequential` and",
        "`soft`, when the requests end.",
        "",
        *markdown(headings, rows),
        "![worst gap between two tokens](fig10.png)",
    ]
    _figure(gaps)
    write("fig10", "Flying Serving, figure 10: switching", lines)


def _run(rate: float, preempt: str) -> SimNode:
    system = flying(replace(machine(MODEL)), 2, POLICIES["manual"], Options())
    clock = Clock()
    node = system.node(clock)
    shape = Poisson(duration_s=90.0, rate_rps=rate, prompt_tokens=(4096, 4096), output_tokens=(256, 256))
    Arrivals(synthesise(shape, SEED).requests, clock, node.arrive)
    clock.at(AT_S, _order, node, Layout.uniform(4, 4), preempt)
    clock.at(BACK_S, _order, node, Layout.uniform(4, 1), preempt)
    while clock.step():
        pass
    return node


def _order(node: SimNode, layout: Layout, preempt: str) -> None:
    """As an operator, who tries again while another switch is under way."""
    if node.controller.changing:
        node.clock.after(0.1, _order, node, layout, preempt)
    else:
        node.order(layout, preempt)


def _worst_gap_s(node: SimNode) -> float:
    return max(later - earlier for r in node.outcome.ended for earlier, later in pairwise(r.token_s or ()))


def _figure(gaps: dict[tuple[float, str], float]) -> None:
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axis = figure.subplots()
    for preempt in PREEMPTS:
        axis.plot(RATES, [gaps[rate, preempt] for rate in RATES], marker="o", label=preempt)
    axis.set(xlabel="requests/s", ylabel="worst gap between two tokens (s)", yscale="log")
    axis.legend(fontsize="small")
    figure.savefig(RESULTS / "fig10.png", dpi=110)
