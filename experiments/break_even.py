"""How long may a switch stop an engine before switching loses against not switching?"""

from __future__ import annotations

from dataclasses import replace

from matplotlib.figure import Figure

from experiments.common import RESULTS, Row, markdown, number, run, system, write
from experiments.traces import NAMES, trace

MODEL = "llama-3-70b"
COSTS_S = (0.0, 0.015, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 147.0)
"""15 ms is the paper's switch, 147 s its cold start of TP 8."""
STATIC = ("static-dp", "static-tp4", "static-tp")


def main() -> list[Row]:
    """Mean end-to-end latency by the cost of a switch."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, len(NAMES))
    lines = [
        "Llama-3-70B on 8 H200s. Each engine whose group changes does nothing for the time in the first column; the",
        "policy does not know of it, so it switches as often as if it were free. Mean end-to-end latency of all",
        "requests, in s.",
        "",
    ]
    for axis, name in zip(axes, NAMES, strict=True):
        fixed = {static: _mean_s(static, name)[0] for static in STATIC}
        best = min(fixed.values())
        moving = [_mean_s("auto", name, cost) for cost in COSTS_S]
        rows = [
            [f"{cost:g}", number(mean), f"{mean / best:.2f}", str(switches)]
            for cost, (mean, switches) in zip(COSTS_S, moving, strict=True)
        ]
        lines += [f"## {name}", "", ", ".join(f"{static} {number(mean)} s" for static, mean in fixed.items()) + ".", ""]
        lines += markdown(["switch (s)", "auto (s)", "auto / best static", "switches"], rows)
        lines += [_verdict([mean for mean, _ in moving], best), ""]
        axis.plot([max(cost, 0.005) for cost in COSTS_S], [mean for mean, _ in moving], marker="o", label="auto")
        for static, mean in fixed.items():
            axis.axhline(mean, linestyle="--", linewidth=1, label=static, color=f"C{1 + STATIC.index(static)}")
        axis.set(
            title=name, xlabel="a switch stops an engine for (s)", ylabel="mean E2E (s)", xscale="log", yscale="log"
        )
        axis.legend(fontsize="x-small")
    figure.savefig(RESULTS / "break_even.png", dpi=110)
    write("break_even", "Break-even: how much may a switch cost?", [*lines, "![break-even](break_even.png)"])
    return []


def _mean_s(name: str, workload: str, switch_s: float = 0.0) -> tuple[float, int]:
    one = system(name, MODEL, keep_times=False)
    one = replace(one, shape=replace(one.shape, switch_s=switch_s))
    done = run(one, MODEL, trace(workload))
    return done.summary["mean_e2el_ms"] / 1e3, len(done.outcome.switches)


def _verdict(means: list[float], best: float) -> str:
    if means[0] > best:
        return f"Even a free switch loses: `auto` is {means[0] / best:.2f} times the best static layout."
    good = [cost for cost, mean in zip(COSTS_S, means, strict=True) if mean <= best]
    return f"Switching pays up to a cost of at least {max(good):g} s."
