"""Servers on emulated devices: stock vLLM at fixed degrees beside `auto`, and each beside the
simulator.

python -m benchmarks.emulated [--model llama-3-70b] [--execution graph] [--slowdown 2] [--rounds 3]

A load of quiet phases and bursts is replayed against each system in turn, the order rotated from
round to round; the others are stopped meanwhile. Steps last `slowdown` times as long as on the
devices, and so do the load's times. All times are given as on the devices: divided by it. The
simulator then runs the same load on the same slowed devices.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.emulated_report import table
from benchmarks.rounds import Rows, phased, replayed, rotated, values_of
from benchmarks.systems import ROOT, System, Systems, commit
from flying_lab.emulation import MODULE
from flying_lab.emulation.command import profile, server_flags
from flying_lab.emulation.profile import Profile
from flying_lab.emulation.slowed import Slowed
from flying_lab.results.metrics import summarise
from flying_lab.signals import ended_by_signals
from flying_lab.sim.cluster import Options
from flying_lab.sim.machine import Machine
from flying_lab.sim.node import System as SimulatedSystem
from flying_lab.sim.run import results, simulate
from flying_lab.sim.system import apart, flying
from flying_lab.workload.model import Workload
from flying_lab.workload.shape import scale_time
from flying_lab.workload.synth import Alternating
from flying_serving.policy.policies import POLICIES

HARDWARE = "h200x8"
OPTIONS = Options(max_num_seqs=1024, max_num_batched_tokens=8192, keep_times=False)
FLAGS = [
    f"--max-num-seqs={OPTIONS.max_num_seqs}",
    f"--max-num-batched-tokens={OPTIONS.max_num_batched_tokens}",
    "--max-model-len=8192",
    "--no-enable-prefix-caching",
    "--disable-uvicorn-access-log",
]
OUT = ROOT / ".bench"


def systems_of(args: argparse.Namespace) -> dict[str, Profile]:
    """Return the systems to compare, by name: stock vLLM at each degree, and `auto`."""
    common = {
        "hardware": HARDWARE,
        "model": args.model,
        "execution": args.execution,
        "slowdown": args.slowdown,
    }
    least = profile(common | {"devices_per_engine": None}).devices_per_engine
    degrees = {"auto": least, "stock-dp": least}
    degrees |= {f"stock-tp{degree}": degree for degree in args.degrees if degree > least}
    return {
        name: profile(common | {"devices_per_engine": degree})
        for name, degree in degrees.items()
        if name in args.systems or not args.systems
    }


def workload_of(args: argparse.Namespace, seed: int) -> Workload:
    """Return the load in the devices' time: it ends with a low phase, whose begin counts apart."""
    low_rps, burst_rps = args.rates
    low_s, burst_s = args.phases
    return phased(
        Alternating(
            duration_s=args.bursts * (low_s + burst_s) + low_s,
            low_rate_rps=low_rps,
            burst_rate_rps=burst_rps,
            low_s=low_s,
            burst_s=burst_s,
        ),
        seed,
    )


def started(name: str, devices: Profile) -> System:
    """Start one server of this comparison."""
    if name == "auto":
        return served(name, devices, "--policy=auto")
    path, *flags = server_flags(devices, ROOT / ".models", stock=True)
    return System(name, Path(path), [*flags, *FLAGS], ours=False, entry=MODULE)


def served(name: str, devices: Profile, *more: str) -> System:
    """Start our server on emulated devices with further flags, which win over those before."""
    path, *flags = server_flags(devices, ROOT / ".models", stock=False)
    system = System(name, Path(path), [*flags, *FLAGS, *more], ours=True, entry=MODULE)
    system.model = devices.model
    return system


def simulated(name: str, devices: Profile, workload: Workload) -> dict[str, Any]:
    """Return the summary of the same load on the simulated devices."""
    machine: Machine = Slowed.of(devices)
    system: SimulatedSystem
    if name == "auto":
        system = flying(machine, devices.devices_per_engine, POLICIES["auto"], OPTIONS)
    else:
        system = apart(machine, devices.devices_per_engine, POLICIES["static-dp"], OPTIONS)
    outcome = simulate(system, workload.requests)
    return summarise(results(system, workload, outcome, "emulated")) | {
        "switches": len(outcome.switches)
    }


def run(args: argparse.Namespace) -> Iterator[tuple[Rows, Rows]]:
    """Yield the values of live servers and of the simulator, after each round those so far."""
    live: Rows = {}
    modelled: Rows = {}
    profiles = systems_of(args)
    names = list(profiles)
    with Systems() as systems:
        for name, devices in profiles.items():
            system = systems.start(started(name, devices))
            print(name, f"ready in {system.ready_s:.0f} s", flush=True)
        for number in range(args.rounds):
            workload = scale_time(workload_of(args, args.seed + number), args.slowdown)
            for name in rotated(names, number):
                system = systems.all[name]
                system.resume()
                summary = replayed(system, workload)
                system.pause()
                there = simulated(name, profiles[name], workload)
                for rows, found in ((live, summary), (modelled, there)):
                    for phase, figure, value in values_of(found, args.slowdown):
                        rows.setdefault((name, phase, figure), []).append(value)
                print(
                    number,
                    name,
                    {
                        f"{phase} {figure}": (round(values[-1], 1), round(modelled[key][-1], 1))
                        for key, values in live.items()
                        for (system_name, phase, figure) in [key]
                        if system_name == name
                    },
                    flush=True,
                )
            yield live, modelled


def kept_rows(args: argparse.Namespace, live: Rows, modelled: Rows) -> dict[str, Any]:
    """Return what is kept of a run: the commit, the settings, and live values beside simulated
    ones.
    """
    rows = [
        {"system": name, "phase": phase, "figure": figure, "live": values, "simulated": there}
        for (name, phase, figure), values in live.items()
        for there in [modelled[name, phase, figure]]
    ]
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    rounds = max(len(values) for values in live.values())
    return {"commit": commit(), "settings": settings | {"rounds": rounds}, "rows": rows}


def main() -> None:
    """Run the comparison, keep all rows, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--execution", choices=("graph", "eager"), default="graph")
    parser.add_argument("--slowdown", type=float, default=2.0)
    parser.add_argument("--degrees", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--systems", nargs="+", default=[])
    parser.add_argument("--rates", type=float, nargs=2, default=(3.5, 15.0))
    parser.add_argument("--phases", type=float, nargs=2, default=(40.0, 25.0))
    parser.add_argument("--bursts", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a JSON file; by default in .bench/")
    args = parser.parse_args()

    out = args.out or OUT / f"emulated-{args.model}-{args.execution}.json"
    out.parent.mkdir(exist_ok=True)
    kept: dict[str, Any] = {}
    for live, modelled in run(args):
        kept = kept_rows(args, live, modelled)
        out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(table(kept))


if __name__ == "__main__":
    with ended_by_signals():
        main()
