"""Host time between the steps of a group, beside tensor parallel stock vLLM of the same degree.

python -m benchmarks.group_host [--rounds 5] [--tokens 240] [--degrees 1 2 4] [--models tiny]

Time stamps in the processes of both systems (`benchmarks.group_stamps`). The model is tiny, or its
devices are emulated: then a gap is the time in which they are idle. All requests come in one body,
are not streamed, and run together: counted are steps that decode one token of each. The two systems
take turns, the other servers stopped; who begins changes from round to round. A first round does
not count. What is measured and what counts was fixed before the first run, in
experiments/plans/group_host.md.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median, quantiles

import httpx
import psutil

from benchmarks.client import ANSWER_S, prompt
from benchmarks.group_cell import EMULATED, REQUESTS, SCHEDULING, Cell
from benchmarks.group_stamps import Stamp
from benchmarks.group_steps import Found, find, find_alone, read
from benchmarks.systems import System, Systems, commit
from flying_lab.signals import ended_by_signals

PROMPT_TOKENS = 4
LEAST_STEPS = 200
QUIET_CORES = 0.3
"""Load by others below which a run counts."""
STOCK, OURS = "stock", "ours"
_seeds = itertools.count(1)


@dataclass
class Served:
    """One system of a cell: its server, where its stamps are, and when its rounds ran.

    `windows`: by number of requests.
    """

    system: System
    folder: Path
    windows: dict[int, list[tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Beside:
    """A figure of ours and of stock: their values of each round (s)."""

    ours: list[float]
    stock: list[float]

    @property
    def ratios(self) -> list[float]:
        """Ours divided by stock, of each round in which stock has any."""
        return [a / b for a, b in zip(self.ours, self.stock, strict=True) if b]

    @property
    def more_s(self) -> list[float]:
        """Ours less stock, of each round."""
        return [a - b for a, b in zip(self.ours, self.stock, strict=True)]


FIGURES: dict[str, Callable[[Found], float]] = {
    "gap, mean": lambda found: fmean(found.gaps_s),
    "gap, median": lambda found: median(found.gaps_s),
    "gap, 10th percentile": lambda found: tenth(found.gaps_s),
    "step, median": lambda found: median(found.steps_s),
    "scheduler's work": lambda found: found.scheduler_s,
    "model runner's work": lambda found: found.runner_s,
    "leader besides the runner": lambda found: found.leader_s,
}


def tenth(values: Sequence[float]) -> float:
    """Return the 10th percentile of at least two values."""
    return quantiles(values, n=10, method="inclusive")[0]


def degrees_held(degrees: Sequence[int], cores: int) -> list[int]:
    """Return the degrees whose members have a core each: others would wait for a core."""
    return [degree for degree in degrees if degree <= cores]


def decode(system: System, requests: int, tokens: int) -> tuple[float, float]:
    """Let a server decode so many requests at once. Return when that began and ended."""
    body = {
        "model": system.model,
        "prompt": [prompt(PROMPT_TOKENS, next(_seeds)) for _ in range(requests)],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    began_s = time.monotonic()
    httpx.post(f"{system.url}/v1/completions", json=body, timeout=ANSWER_S).raise_for_status()
    return began_s, time.monotonic()


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def _own_s(system: System) -> float:
    server = psutil.Process(system.process.pid)
    every = [psutil.Process(), server, *server.children(recursive=True)]
    return sum(one.cpu_times().user + one.cpu_times().system for one in every)


def run_round(served: Sequence[Served], copies: int, tokens: int) -> list[float]:
    """Run one round of the systems of a cell, in this order. Return the cores that others had."""
    others = []
    for requests in REQUESTS:
        for one in served:
            one.system.resume()
            busy_s, own_s = _busy_s(), _own_s(one.system)
            window = decode(one.system, requests * copies, tokens)
            spent_s = (_busy_s() - busy_s) - (_own_s(one.system) - own_s)
            one.system.pause()
            one.windows.setdefault(requests, []).append(window)
            others.append(max(0.0, spent_s) / (window[1] - window[0]))
    return others


def compare(
    ours: Sequence[Found], stock: Sequence[Found], figure: Callable[[Found], float]
) -> Beside:
    """Return a figure of both systems, by rounds."""
    return Beside([figure(found) for found in ours], [figure(found) for found in stock])


def _spread(values: Sequence[float], scale: float = 1.0) -> str:
    if not values:
        return "-"
    scaled = [scale * value for value in values]
    return f"{median(scaled):.4g} [{min(scaled):.4g}..{max(scaled):.4g}]"


def lines(cell: str, ours: Sequence[Found], stock: Sequence[Found]) -> list[str]:
    """Return the table of one cell, in us; all values are medians of rounds, with the spread."""
    fewest = min(len(found.gaps_s) for found in (*ours, *stock))
    short = "" if fewest >= LEAST_STEPS else f": FEWER THAN {LEAST_STEPS}"
    rows = [f"{cell}, at least {fewest} steps a round{short}"]
    for name, figure in FIGURES.items():
        beside = compare(ours, stock, figure)
        rows.append(
            f"  {name:26}{OURS} {_spread(beside.ours, 1e6)}, {STOCK} {_spread(beside.stock, 1e6)}, "
            f"more {_spread(beside.more_s, 1e6)}, ratio {_spread(beside.ratios)}"
        )
    return rows


def start(systems: Systems, cell: Cell, scratch: Path) -> dict[str, Served]:
    """Start both servers of a cell, stamped, ours in the layout of its degree."""
    served = {}
    for name in (STOCK, OURS):
        folder = scratch / name
        folder.mkdir()
        os.environ["STAMPS"] = str(folder)
        ours = name == OURS
        path, *flags = cell.path_and_flags(ours=ours)
        system = System(
            f"{name} {cell}",
            Path(path),
            flags,
            ours=ours,
            plugin=None if ours else "stock_stamps",
            entry="benchmarks.group_stamps" if ours else "",
        )
        if cell.model is not None:
            system.model = cell.model
        if ours and cell.degree > 1:
            system.layout([list(range(cell.degree))])
        served[name] = Served(systems.start(system), folder)
    return served


def measure(cell: Cell, rounds: int, tokens: int) -> list[float]:
    """Run all rounds of a cell and print its table. Return the cores that others had."""
    others = []
    with tempfile.TemporaryDirectory() as scratch, Systems() as systems:
        served = start(systems, cell, Path(scratch))
        for number in range(rounds + 1):
            in_turn = list(served.values())[:: 1 if number % 2 else -1]
            cores = run_round(in_turn, cell.copies, tokens)
            others += cores if number else []
        stamps = {name: read(one.folder) for name, one in served.items()}
        for requests in REQUESTS:
            found = {
                name: [
                    _found(cell, stamps[name], window, requests)
                    for window in one.windows[requests][1:]
                ]
                for name, one in served.items()
            }
            title = f"{cell}, {requests} requests (us)"
            print("\n".join(lines(title, found[OURS], found[STOCK])), flush=True)
    return others


def _found(
    cell: Cell, stamps: list[list[Stamp]], window: tuple[float, float], requests: int
) -> Found:
    if cell.degree == 1:
        return find_alone(stamps, window, requests)
    return find(stamps, window, requests, cell.degree)


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=240, help="of each request")
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--models", nargs="+", default=["tiny", *EMULATED])
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    degrees = degrees_held(options.degrees, cores)
    print(
        f"{commit()}: {cores} cores, degrees {degrees} of {options.degrees}, "
        f"{options.rounds} rounds of {options.tokens} tokens",
        flush=True,
    )
    others = []
    for model, degree, scheduling in itertools.product(options.models, degrees, SCHEDULING):
        cell = Cell(degree, scheduling, None if model == "tiny" else model)
        if cell.is_possible:
            others += measure(cell, options.rounds, options.tokens)
    quiet = "quiet" if max(others) < QUIET_CORES else "NOT QUIET: run it again"
    print(f"cores that others had: {_spread(others)}: {quiet}")


if __name__ == "__main__":
    with ended_by_signals():
        main()
