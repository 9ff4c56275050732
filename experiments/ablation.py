"""What each constant of the policy does: mean E2E and P90 TTFT at half and twice its value, one at
a time.

python -m experiments.ablation [--seeds 1 5 9] [--only NAMES | --steady | --save FILE | --beside
FILE]

One process. The unchanged policy takes about 100 s on all seeds and 25 s on three, so the table
takes 90 minutes, and 25 with three seeds. `--save` and `--beside` put the policies of two commits
side by side; a commit before this file needs a copy of it with that commit's names of `Options`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from experiments.common import DATA, MAX_NUM_SEQS
from experiments.constants import CONSTANTS, scaled
from flying_lab.results.metrics import summarise
from flying_lab.sim import hardware, models
from flying_lab.sim.catalog import build
from flying_lab.sim.machine import Machine, Modelled, load_measured
from flying_lab.sim.run import results, simulate
from flying_lab.sim.system import Options
from flying_lab.workload import shape
from flying_lab.workload.model import Workload
from flying_lab.workload.read import read_workload
from flying_lab.workload.synth import Alternating, Poisson, synthesise

SEEDS = range(1, 13)
WORKLOADS = ("alternating", "azure", "steady")
LOADS, STEADY_S = 20, 100.0
Figures = dict[str, list[dict[str, float]]]
"""By machine and workload, the figures of each seed."""
SMALL: dict[str, Any] = {"prompt_tokens": (64, 512), "output_tokens": (16, 96)}
"""Lengths on the two-engine machine, as in benchmarks/policies.py."""


class Place(NamedTuple):
    """A machine with the load that suits it: rates in requests/s, phases in s."""

    machine: Machine
    options: Options
    lengths: Mapping[str, Any]
    low: float
    burst: float
    phases_s: tuple[float, float]
    seconds: float
    steady: tuple[float, float]
    azure: tuple[float, float]
    """Factors on the trace's inter-arrival times and prompt lengths."""


@cache
def places() -> dict[str, Place]:
    """The two machines."""
    large = Modelled(models.load("llama-3-70b"), hardware.parse_devices("h200x8"), 0.8)
    two = load_measured(DATA / "two_engines.json")
    options = Options(max_num_seqs=MAX_NUM_SEQS, keep_times=False)
    small = replace(options, max_num_seqs=64, max_num_batched_tokens=512)
    return {
        "8 H200": Place(large, options, {}, 2.0, 9.0, (40.0, 30.0), 110.0, (0.5, 9.0), (1.0, 1.0)),
        "2 engines": Place(
            two, small, SMALL, 0.5, 2.5, (40.0, 12.0), 152.0, (0.2, 1.6), (6.0, 0.125)
        ),
    }


@cache
def workload(where: str, kind: str, seed: int) -> Workload:
    """One of WORKLOADS: `steady` has another rate with each seed, `azure` another window of the
    trace.
    """
    place = places()[where]
    if kind == "alternating":
        low_s, burst_s = place.phases_s
        rates: dict[str, Any] = {"low_rate_rps": place.low, "burst_rate_rps": place.burst}
        asked = Alternating(
            low_s=low_s, burst_s=burst_s, duration_s=place.seconds, **rates, **place.lengths
        )
        return synthesise(asked, seed)
    if kind == "azure":
        slower, prompt = place.azure
        begin_s = (seed - 1) * 36.0 % 417.0  # the trace has 604 s
        part = shape.window(
            read_workload(DATA / "traces" / "azure_code.csv", 1), begin_s, begin_s + 200.0
        )
        return shape.scale_time(shape.scale_lengths(part, prompt=prompt), slower)
    return poisson(where, (seed - 1) % len(SEEDS) / (len(SEEDS) - 1), 100.0, seed)


def poisson(where: str, share: float, seconds: float, seed: int) -> Workload:
    """A steady load, `share` of the way from the least to the highest rate."""
    place = places()[where]
    low, high = place.steady
    rate = low * (high / low) ** share
    return synthesise(Poisson(rate_rps=rate, duration_s=seconds, **place.lengths), seed)


def served(where: str, work: Workload) -> tuple[dict[str, Any], int]:
    """The summary of a simulated run, and its switches."""
    place = places()[where]
    system = build("auto", place.machine, place.machine.smallest_engine, place.options)
    outcome = simulate(system, work.requests)
    return summarise(results(system, work, outcome, where)), sum(
        s.decided_s > 0 for s in outcome.switches
    )


def measure(seeds: Sequence[int]) -> Figures:
    """By machine and workload, figures of each seed."""
    found: Figures = {}
    for where in places():
        for kind in WORKLOADS:
            rows = []
            for seed in seeds:
                summary, switches = served(where, workload(where, kind, seed))
                burst = summary.get("phases", {}).get("burst", summary)
                rows.append(
                    {
                        "e2e_s": summary["mean_e2el_ms"] / 1e3,
                        "ttft_p90_s": summary["p90_ttft_ms"] / 1e3,
                        "burst_p90_s": burst["p90_ttft_ms"] / 1e3,
                        "switches": switches,
                    }
                )
            found[f"{where}, {kind}"] = rows
    return found


def beside(new: Figures, old: Figures, key: str) -> list[str]:
    """By machine and workload the ratio of means, and of each seed the median ratio
    [smallest..largest].
    """
    cells = []
    for name, rows in new.items():
        ratios = [row[key] / other[key] for row, other in zip(rows, old[name], strict=True)]
        total = mean(row[key] for row in rows) / mean(row[key] for row in old[name])
        cells.append(f"{total:.3f}, {median(ratios):.2f} [{min(ratios):.2f}..{max(ratios):.2f}]")
    return cells


def overall(new: Figures, old: Figures, key: str) -> float:
    """The geometric mean over machines and workloads of the ratio of means."""
    ratios = [
        mean(r[key] for r in rows) / mean(r[key] for r in old[name]) for name, rows in new.items()
    ]
    return math.exp(mean(map(math.log, ratios)))


def worst(new: Figures, old: Figures, key: str) -> float:
    """The ratio of means that is farthest from 1."""
    ratios = [
        mean(r[key] for r in rows) / mean(r[key] for r in old[name]) for name, rows in new.items()
    ]
    return max(ratios, key=lambda ratio: abs(math.log(ratio)))


def ablation(seeds: Sequence[int], names: Sequence[str]) -> None:
    """Print the table: ratios to the present values, geometric mean over the workloads, and in
    brackets the worst.
    """
    base = measure(seeds)
    print(
        "| constant | value | unit | purpose | E2E at half | at twice | P90 TTFT at half | at "
        "twice |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for constant in CONSTANTS:
        if constant.name not in names:
            continue
        value = getattr(importlib.import_module(f"flying_serving.{constant.module}"), constant.name)
        shown = ", ".join(map("{:g}".format, value if isinstance(value, list | tuple) else [value]))
        halved, doubled = [], []
        for factor, into in ((0.5, halved), (2.0, doubled)):
            with scaled(constant, factor):
                found = measure(seeds)
            into += [
                f"{overall(found, base, k):.3f} ({worst(found, base, k):.2f})"
                for k in ("e2e_s", "ttft_p90_s")
            ]
        cells = [f"`{constant.name}`", shown, constant.unit, constant.purpose]
        print(
            "| " + " | ".join([*cells, halved[0], doubled[0], halved[1], doubled[1]]) + " |",
            flush=True,
        )


def steady() -> None:
    """Print the switches within 100 steady seconds after the first 0, at 20 loads of each
    machine.
    """
    for where, place in places().items():
        made = []
        for number in range(LOADS):
            work = poisson(where, number / (LOADS - 1), STEADY_S, 100 + number)
            system = build("auto", place.machine, place.machine.smallest_engine, place.options)
            switches = simulate(system, work.requests).switches
            made.append(sum(0.0 < switch.decided_s < STEADY_S for switch in switches))
        print(f"{where}: {sum(made)} switches in {LOADS * STEADY_S:.0f} s, by load {made}")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument(
        "--only", nargs="+", default=[one.name for one in CONSTANTS], help="constants of the table"
    )
    parser.add_argument("--steady", action="store_true", help="count switches at steady loads")
    parser.add_argument(
        "--save", type=Path, help="measure the unchanged policy, and keep it in a file"
    )
    parser.add_argument("--beside", type=Path, help="compare the unchanged policy with such a file")
    args = parser.parse_args()
    if args.steady:
        steady()
    elif args.save is not None:
        args.save.write_text(json.dumps(measure(args.seeds)), encoding="utf-8")
    elif args.beside is not None:
        new, old = measure(args.seeds), json.loads(args.beside.read_text(encoding="utf-8"))
        names = list(new)
        for key in ("e2e_s", "ttft_p90_s", "burst_p90_s"):
            print(
                key,
                *(f"{n}: {cell}" for n, cell in zip(names, beside(new, old, key), strict=True)),
                sep="\n  ",
            )
        print(
            {
                n: (mean(r["switches"] for r in new[n]), mean(r["switches"] for r in old[n]))
                for n in names
            }
        )
    else:
        ablation(args.seeds, args.only)


if __name__ == "__main__":
    main()
