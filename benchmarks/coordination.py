"""What it costs to coordinate a step of a group, beyond its collectives, and what lane 1 pays for
there being lanes.

python -m benchmarks.coordination [--rounds 20] [--parts group llama llama-75m]

Two engines. First, time stamps in the engines of one server (`benchmarks.stamped`): from the moment
at which a group's leader has planned a step until its last member has its own block numbers in the
plan and begins to compute. Stock vLLM's tensor parallelism brings its plans to its workers too;
that is not subtracted. Second, the processor time for a token of the engines of stock vLLM's data
parallelism, of our server without lanes (`static-dp`) and of its lane 1 (`manual`, apart), with a
tiny model, whose steps are mostly host time, and with one of 74 M parameters: what else runs on the
machine makes a step longer, but hardly changes what processor time it takes. The three take turns,
the others stopped; who begins changes from round to round. A first round does not count.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import psutil

from benchmarks import stamped
from benchmarks.client import prompt, run_streams
from benchmarks.steady_state import APART, FLAGS, TOGETHER
from benchmarks.systems import DP, ROOT, System, Systems
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import make_model

STREAMS = (1, 8, 32)
"""Requests in the group's steps."""
OUTPUT = {"llama": 120, "llama-75m": 48}
MANY = 16
STOCK, WITHOUT, LANE_1 = "stock DP", "ours without lanes", "ours, lane 1"
MEMBERS = 2
GROUP = "group"
_seeds = itertools.count(1)
Window = tuple[int, float, float]


def time_group(system: System, windows: list[list[Window]]) -> None:
    """One round of the group: streams of each count, and when they ran."""
    system.resume()
    system.layout(TOGETHER)
    found = []
    for streams in STREAMS:
        began_s = time.monotonic()
        run_streams(
            system.url, system.model, [prompt(16, next(_seeds)) for _ in range(streams)], 120
        )
        found.append((streams, began_s, time.monotonic()))
    system.pause()
    windows.append(found)


def time_tokens(system: System, model: str) -> tuple[float, float]:
    """Processor time of the engines for each token (s): of one stream, and of MANY at once."""
    system.resume()
    if system.name.endswith(LANE_1):
        system.layout(APART)
    found = []
    for streams in (1, MANY):
        prompts = [prompt(16, next(_seeds)) for _ in range(streams)]
        before_s = engines_s(system)
        run_streams(system.url, system.model, prompts, OUTPUT[model])
        found.append((engines_s(system) - before_s) / (streams * OUTPUT[model]))
    system.pause()
    return found[0], found[1]


def engines_s(system: System) -> float:
    """Processor time that a server's engines have had, with the workers in which stock vLLM's run
    the model.
    """
    children = psutil.Process(system.process.pid).children(recursive=True)
    engines = [
        one
        for one in children
        if any(name in " ".join(one.cmdline()) for name in ("EngineCore", "Worker"))
    ]
    return sum(one.cpu_times().user + one.cpu_times().system for one in engines)


def report_group(folder: Path, windows: list[list[Window]]) -> None:
    """Coordination of steps that decode, by the requests in them, and lines through them.

    What else runs on the machine makes some of them longer and none shorter, so the 10th percentile
    of all is nearer to what coordination takes than a median.
    """
    steps = [
        step
        for step in stamped.read(folder).values()
        if len(step[3]) == MEMBERS and step[0] == step[1]
    ]
    lines: dict[str, list[float]] = {"10th percentile": [], "median": []}
    print("group of two, from planned to begun by the last member (us)")
    for index, streams in enumerate(STREAMS):
        rounds = []
        for one in windows:
            _, began_s, ended_s = one[index]
            took = [
                max(begun) - at_s
                for n, _, at_s, begun in steps
                if n == streams and began_s <= at_s < ended_s
            ]
            rounds.append([value * 1e6 for value in took])
        every = [value for one in rounds for value in one]
        lines["10th percentile"].append(quantiles(every, n=10)[0])
        lines["median"].append(median(every))
        lowest, middle = (
            [of(one) for one in rounds] for of in (lambda one: quantiles(one, n=10)[0], median)
        )
        print(
            f"  {streams:3} requests, {len(every)} steps: 10th percentile "
            f"{quantiles(every, n=10)[0]:.0f}, by rounds "
            f"{_spread(lowest)}; median {median(every):.0f}, by rounds {_spread(middle)}; "
            f"smallest {min(every):.0f}"
        )
    for name, values in lines.items():
        slope, fixed = np.polyfit(STREAMS, values, 1)
        print(f"  {name}: {fixed:.0f} us and {slope:.2f} us for each request")


def report_lanes(model: str, values: dict[tuple[str, int], list[float]]) -> None:
    """Processor time of each system, and what lane 1 takes more than the others, round by round."""
    for of, streams in ((0, 1), (1, MANY)):
        print(f"{model}, {streams} streams: processor time of the engines for a token (us)")
        for name in (STOCK, WITHOUT, LANE_1):
            print(f"  {name:30}{_spread([1e6 * value for value in values[name, of]])}")
        for other in (STOCK, WITHOUT):
            pairs = list(zip(values[LANE_1, of], values[other, of], strict=True))
            print(
                f"  lane 1 / {other:21}{_spread([a / b for a, b in pairs])}; more for a token "
                f"{_spread([(a - b) * 1e6 for a, b in pairs])} us"
            )


def _spread(values: list[float]) -> str:
    return f"{median(values):.4g} [{min(values):.4g}..{max(values):.4g}]"


def time_groups(rounds: int) -> None:
    """The first part."""
    windows: list[list[Window]] = []
    with tempfile.TemporaryDirectory() as scratch, Systems() as systems:
        os.environ["STAMPS"] = scratch
        flags = [*FLAGS, DP, "--policy=manual"]
        model = make_model(ROOT / ".models" / "llama", "llama")
        group = systems.start(System("group", model, flags, ours=True, entry="benchmarks.stamped"))
        for _ in range(rounds + 1):
            time_group(group, windows)
        print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
        report_group(Path(scratch), windows[1:])


def time_lanes(name: str, rounds: int) -> None:
    """The second part, with one model."""
    model = make_model(ROOT / ".models" / name, name)
    values: dict[tuple[str, int], list[float]] = defaultdict(list)
    with Systems() as systems:
        three = [
            (
                of,
                systems.start(System(f"{name} {of}", model, [*FLAGS, DP, *more], ours=of != STOCK)),
            )
            for of, more in (
                (STOCK, []),
                (WITHOUT, ["--policy=static-dp"]),
                (LANE_1, ["--policy=manual"]),
            )
        ]
        for number in range(rounds + 1):
            for of, system in three[number % 3 :] + three[: number % 3]:
                for streams, value in enumerate(time_tokens(system, name)):
                    values[of, streams].append(value)
        print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
    report_lanes(name, {key: counted[1:] for key, counted in values.items()})


def main() -> None:
    """Run it and print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--parts", nargs="+", choices=[GROUP, *OUTPUT], default=[GROUP, *OUTPUT])
    options = parser.parse_args()
    for part in options.parts:
        if part == GROUP:
            time_groups(options.rounds)
        else:
            time_lanes(part, options.rounds)


if __name__ == "__main__":
    with ended_by_signals():
        main()
