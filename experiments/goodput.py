"""The share of requests within an SLO by the rate of arrivals: a curve for each system."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from experiments import loads, servers
from experiments.common import FIRST, Kept, Numbers, Setting, run, template
from experiments.phases_load import OPTIONS
from experiments.rows import Row, markdown, number, page, paragraph, write
from experiments.server_pages import NOTICES
from experiments.servers import GRAPHS
from flying_lab.results.metrics import summarise
from flying_lab.sim.node import System
from flying_lab.workload.synth import Poisson, synthesise
from flying_serving.policy.policies import POLICIES
from flying_serving.slo import Slo

MODEL, SECONDS, ENOUGH = "llama-3-70b", 300.0, 0.9
RATES_RPS = tuple(2.0 + 0.5 * step for step in range(13))
SLO = Slo(ttft=500.0, tpot=40.0)
AIMED = "auto, --slo"
LEAST_RPS = 6.3
"""Bar of `auto`."""


def measure(setting: Setting) -> Numbers:
    """By rate and system: the share of requests within the SLO."""
    return {
        f"{rate_rps:g}": {name: _share(one, rate_rps, setting) for name, one in compared(setting)}
        for rate_rps in RATES_RPS
    }


def compared(setting: Setting) -> Iterator[tuple[str, System]]:
    """Yield the systems of docs/lab/results/loads.md, and `auto` with these targets."""
    aimed = replace(OPTIONS, slo_s=SLO.targets_s)
    yield from ((one.name, one) for one in loads.compared(MODEL, setting))
    yield AIMED, servers.ours(GRAPHS, POLICIES["auto"], MODEL, setting, aimed)


def _share(one: System, rate_rps: float, setting: Setting) -> float:
    work = synthesise(Poisson(rate_rps=rate_rps, duration_s=SECONDS), FIRST.seed)
    return float(f"{summarise(run(one, MODEL, work).results, SLO)['slo_attainment']:.4g}")


def names(found: Kept) -> list[str]:
    """Return the systems."""
    return list(found.seeds[0][f"{RATES_RPS[0]:g}"])


def share(found: Kept, name: str, rate_rps: float) -> float:
    """Return the share of a system's requests within the SLO at a rate."""
    return float(found.seeds[0][f"{rate_rps:g}"][name])


def most_rps(found: Kept, name: str) -> float:
    """Return the highest rate up to which at least ENOUGH are within the SLO; 0 if none."""
    most = 0.0
    for rate_rps in RATES_RPS:
        if share(found, name, rate_rps) < ENOUGH:
            break
        most = rate_rps
    return most


def behind(found: Kept) -> list[str]:
    """Return the rates at which another system has a larger share than `auto`, with its name."""
    others = [name for name in names(found) if name not in ("auto", AIMED)]
    there = []
    for rate_rps in RATES_RPS:
        first = max(others, key=lambda name: share(found, name, rate_rps))
        if share(found, first, rate_rps) > share(found, "auto", rate_rps):
            there.append(f"{rate_rps:g} (`{first}`)")
    return there


def headline(found: Kept) -> str:
    """Return in a sentence up to which rate 90 % of requests are within the SLO."""
    stock = [name for name in names(found) if name.startswith("stock-")]
    first = max(stock, key=lambda name: most_rps(found, name))
    return (
        f"{100 * ENOUGH:.0f} % of requests are within TTFT {SLO.ttft:g} ms and TPOT "
        f"{SLO.tpot:g} ms up to {most_rps(found, 'auto'):g} requests/s with `auto`, "
        f"{most_rps(found, first):g} with the best layout of stock vLLM (`{first}`)."
    )


def pages(found: Kept, folder: Path) -> list[Row]:
    """Write the page; it compares nothing with the paper."""
    bar = "met" if most_rps(found, "auto") >= LEAST_RPS else "missed"
    where = ", ".join(behind(found)) or "none"
    lines = paragraph(template("goodput", bar=bar, least=LEAST_RPS, behind=where))
    rates = [f"{rate_rps:g}" for rate_rps in RATES_RPS]
    rows = [
        [
            name,
            f"{most_rps(found, name):g}",
            *(number(share(found, name, rate_rps)) for rate_rps in RATES_RPS),
        ]
        for name in names(found)
    ]
    lines += markdown(["system", f"{100 * ENOUGH:.0f} % up to", *rates], rows)
    title = "The share of requests within an SLO, by the rate of arrivals"
    write(folder, "goodput", page(title, {"goodput": found}, lines, NOTICES))
    return []
