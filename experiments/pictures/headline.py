"""The headline, simulated: `auto` beside the fixed layouts of stock vLLM and Shift Parallelism, by
phase of a load and by the rate of arrivals.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import goodput, phases_whole
from experiments.common import Kept
from experiments.goodput import MODEL
from experiments.servers import GRAPHS, STOCK, is_fixed
from flying_lab.bench.report.style import COLOURS, DASHES, FAINT, styled

SHOWN = ("low", "burst")
"""Phases that have bars."""
WIDTH = 0.8
"""Of the bars of one phase together."""


@styled
def draw(found: Kept, rates: Kept) -> Figure:
    """Return the picture, of kept numbers: the load with phases, and the goodput."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    phases, shares = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1.15, 1.0)})
    systems = {"auto": GRAPHS, phases_whole.SHIFT: STOCK}
    systems |= {name: STOCK for name in found.seeds[0][MODEL][STOCK] if is_fixed(name)}
    width = WIDTH / len(systems)
    for place, (name, server) in enumerate(systems.items()):
        look = {"color": COLOURS[place % len(COLOURS)]}
        middles = np.arange(len(SHOWN) + 1) + (place - (len(systems) - 1) / 2) * width
        phases.bar(middles, _means_s(found, server, name), 0.92 * width, label=name, **look)
        _curve(shares, rates, name, look | {"linestyle": DASHES[place % len(DASHES)]})
    phases.set_xticks(range(len(SHOWN) + 1), [*SHOWN, "whole load"])
    phases.set(ylabel="seconds")
    phases.set_title(f"Mean end-to-end latency, {MODEL} on 8 H200s (simulated)")
    phases.grid(axis="x", visible=False)
    shares.axhline(goodput.ENOUGH, color=FAINT, linewidth=0.8)
    shares.set(xlabel="requests/s", ylabel="share of requests", ylim=(0, 1.03))
    slo = f"TTFT {goodput.SLO.ttft:g} ms and TPOT {goodput.SLO.tpot:g} ms"
    shares.set_title(f"Within {slo} (simulated)")
    figure.legend(*phases.get_legend_handles_labels(), loc="outside upper left", ncols=len(systems))
    return figure


def _means_s(found: Kept, server: str, name: str) -> list[float]:
    """Return a system's mean E2E in each phase of SHOWN and over the whole load, in means over the
    seeds.
    """
    runs = [one[MODEL][server][name] for one in found.seeds]
    in_phases = [[run["phases"][phase][phases_whole.E2E] for run in runs] for phase in SHOWN]
    whole = [phases_whole.whole(run, phases_whole.E2E) for run in runs]
    return [mean(ms) / 1e3 for ms in (*in_phases, whole)]


def _curve(axes: Any, rates: Kept, name: str, look: dict[str, Any]) -> None:
    """Draw the share of a system's requests within the targets, by the rate of arrivals."""
    shares = [goodput.share(rates, name, rate_rps) for rate_rps in goodput.RATES_RPS]
    axes.plot(goodput.RATES_RPS, shares, **look)
