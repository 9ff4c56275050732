"""How long may a switch stop an engine before switching loses against not switching?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from experiments.common import Kept, Numbers, Setting, run, system
from experiments.rows import Row, markdown, page, spread, write
from experiments.traces import NAMES, trace, traces

MODEL = "llama-3-70b"
COSTS_S = (0.0, 0.015, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 147.0)
"""15 ms is the paper's switch, 147 s its cold start of TP 8."""
STOCK = ("stock-dp", "stock-tp4", "stock-tp")


def measure(setting: Setting) -> Numbers:
    """By workload: mean end-to-end latency of the stock layouts and of `auto`, by the cost of a
    switch.
    """
    return {name: _measure(name, setting) for name in traces(NAMES, setting.seed)}


def _measure(name: str, setting: Setting) -> Numbers:
    fixed = {stock: mean_s(stock, name, setting)[0] for stock in STOCK}
    return {
        **fixed,
        "auto": {f"{cost:g}": mean_s("auto", name, setting, cost) for cost in COSTS_S},
    }


def mean_s(name: str, workload: str, setting: Setting, switch_s: float = 0.0) -> tuple[float, int]:
    """Mean end-to-end latency in s and switches of one system, of which each costs `switch_s`."""
    one = system(name, MODEL, setting, keep_times=False)
    one = replace(one, shape=replace(one.shape, switch_s=switch_s))
    done = run(one, MODEL, trace(workload, setting.seed))
    return done.summary["mean_e2el_ms"] / 1e3, len(done.outcome.switches)


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the page and its figure; it compares nothing with the paper."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    axes = figure.subplots(1, len(NAMES))
    lines = [
        "Llama-3-70B on 8 H200s. Each engine whose group changes does nothing for the time in "
        "the first column; the",
        "policy does not know of it, so it switches as often as if it were free. Mean end-to-end "
        "latency of all",
        f"requests, in s: means of {len(found.seeds)} seeds [smallest..largest], each ratio that "
        "of one seed. Nothing",
        "is random in the Azure trace.",
        "",
    ]
    for axis, name in zip(axes, NAMES, strict=True):
        runs = [one[name] for one in found.seeds if name in one]
        best = [min(one[stock] for stock in STOCK) for one in runs]
        autos = {cost: [one["auto"][f"{cost:g}"] for one in runs] for cost in COSTS_S}
        ratios = {
            cost: [auto[0] / fixed for auto, fixed in zip(autos[cost], best, strict=True)]
            for cost in COSTS_S
        }
        rows = [
            [f"{cost:g}", spread([one[0] for one in autos[cost]]), spread(ratios[cost]),
             spread([one[1] for one in autos[cost]])]
            for cost in COSTS_S
        ]  # fmt: skip
        lines += [f"## {name}", ""]
        lines += [
            ", ".join(f"{stock} {spread([one[stock] for one in runs])} s" for stock in STOCK) + ".",
            "",
        ]
        lines += markdown(["switch (s)", "auto (s)", "auto / best stock", "switches"], rows)
        lines += [_verdict(ratios), ""]
        means = [mean(one[0] for one in autos[cost]) for cost in COSTS_S]
        axis.plot([max(cost, 0.005) for cost in COSTS_S], means, marker="o", label="auto")
        for n, stock in enumerate(STOCK):
            fixed = mean(one[stock] for one in runs)
            axis.axhline(fixed, linestyle="--", linewidth=1, label=stock, color=f"C{1 + n}")
        labels = {"xlabel": "a switch stops an engine for (s)", "ylabel": "mean E2E (s)"}
        axis.set(title=name, xscale="log", yscale="log", **labels)
        axis.legend(fontsize="x-small")
    figure.savefig(folder / "break_even.png", dpi=110)
    lines.append("![break-even, means of the seeds](break_even.png)")
    write(
        folder,
        "break_even",
        page("Break-even: how much may a switch cost?", {"break_even": found}, lines),
    )
    return []


def _verdict(ratios: dict[float, list[float]]) -> str:
    good = [cost for cost in COSTS_S if max(ratios[cost]) <= 1]
    if not good:
        share = spread(ratios[0.0])
        return (
            f"Not even a free switch pays with every seed: `auto` is {share} times the "
            "best stock layout."
        )
    return f"Switching pays with every seed up to a cost of at least {max(good):g} s."
