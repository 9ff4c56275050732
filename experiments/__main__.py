"""`make experiments`: every table and figure of docs/lab/results that is simulated, and the pages
of live measurements.

    python -m experiments             all that is simulated, with all seeds that it has
    python -m experiments NAME ...    those; then all pages are written, the others from the numbers
                                      that are kept of them
    python -m experiments --pages     only the pages, from the numbers that are kept: simulated
                                      ones, docs/lab/results.md, docs/lab/results/chaos.md, the
                                      section of measurements of docs/benchmarks.md, the table of
                                      README, and the pictures; new rows are entered in
                                      numbers/rows.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Protocol

from experiments import (
    against_paper,
    break_even,
    chaos_page,
    comparisons,
    dynaserve,
    dynaserve_lengths,
    fig8_fig9,
    front_page,
    goodput,
    gyges,
    held_out,
    ledger,
    live,
    loads,
    low_phases,
    nodes,
    oracle,
    parts,
    phases,
    pictures,
    release_switches,
    table1,
    table2,
    three_papers,
    token_split,
)
from experiments.common import (
    KERNELS,
    RESULTS,
    SEEDS,
    Kept,
    Numbers,
    Setting,
    commit,
    keep,
    kept,
    numbers_path,
)
from experiments.rows import Row


class Experiment(Protocol):
    """A module: what one run finds, and the pages of what all have found."""

    def measure(self, setting: Setting) -> Numbers:
        """One run."""

    def pages(self, found: Kept, folder: Path) -> list[Row]:
        """Write pages and figures to a folder; what they compare with the paper."""


ALL: dict[str, Experiment] = {
    "token_split": token_split,
    "phases": phases,
    "loads": loads,
    "parts": parts,
    "held_out": held_out,
    "oracle": oracle,
    "low_phases": low_phases,
    "fig8_fig9": fig8_fig9,
    "goodput": goodput,
    "break_even": break_even,
    "table1": table1,
    "dynaserve": dynaserve,
    "dynaserve_lengths": dynaserve_lengths,
    "nodes": nodes,
    "release_switches": release_switches,
    "gyges": gyges,
    "table2": table2,
}
"""The longest first."""
HEADLINES = tuple(against_paper.PAGES)
"""Those that the other memory efficiency is tried on."""
FEWER_SEEDS = {
    "held_out": SEEDS[:2],
    "nodes": SEEDS[:2],
    "loads": SEEDS[:2],
    "parts": SEEDS[:1],
    "goodput": SEEDS[:1],
}
"""Of experiments that are planned with fewer."""


def settings(name: str) -> list[Setting]:
    """Every run of an experiment."""
    kernels = [Setting(memory_efficiency=KERNELS)] if name in HEADLINES else []
    return [*(Setting(seed) for seed in FEWER_SEEDS.get(name, SEEDS)), *kernels]


def timed(name: str, setting: Setting) -> tuple[str, str, Numbers, str]:
    """One run; its name, its setting's, what it found, and what to print."""
    began_s, used_s = time.perf_counter(), time.process_time()
    found = ALL[name].measure(setting)
    passed_s, took_s = time.perf_counter() - began_s, time.process_time() - used_s
    return (
        name,
        setting.name,
        found,
        f"{name}, {setting.name}: {passed_s:.0f} s ({took_s:.0f} s of processor time)",
    )


def measure(chosen: list[str]) -> None:
    """Run all that is needed in two processes, and keep what was found."""
    at, found = commit(), defaultdict[str, dict[str, Numbers]](dict)
    runs = [(name, setting) for name in ALL if name in chosen for setting in settings(name)]
    with ProcessPoolExecutor(2) as workers:
        for name, setting, numbers, line in workers.map(timed, *zip(*runs, strict=True)):
            print(line, flush=True)
            found[name][setting] = numbers
            if len(found[name]) == len(settings(name)):
                keep(name, at, found[name])


def write_pages(folder: Path) -> None:
    """All simulated pages, from the numbers that are kept."""
    numbers = {name: kept(name) for name in ALL}
    rows = {name: ALL[name].pages(found, folder) for name, found in numbers.items()}
    against_paper.pages(numbers, rows, folder)
    three_papers.pages(numbers, rows, folder)


def write_live() -> None:
    """The pages of live measurements, and the list of all rows that were ever published."""
    live.PAGE.write_text(live.page(), encoding="utf-8")
    chaos_page.PAGE.write_text(chaos_page.page(), encoding="utf-8")
    comparisons.PAGE.write_text(comparisons.page(), encoding="utf-8")
    sections = {
        live.BENCHMARKS: live.section(comparisons.measured_values()),
        live.README: front_page.section(),
    }
    for path, inner in sections.items():
        text = path.read_text(encoding="utf-8")
        path.write_text(live.between_marks(text, inner), encoding="utf-8")
    pictures.write()
    ledger.enter()


def options(arguments: list[str]) -> argparse.Namespace:
    """What the command line asks for. Exits with a message if it is wrong."""
    parser = argparse.ArgumentParser(
        "python -m experiments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = f"experiments to run, all by default: {', '.join(ALL)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument("--pages", action="store_true", help="run none, only write the pages")
    parsed = parser.parse_args(arguments)
    if unknown := sorted(set(parsed.names) - set(ALL)):
        parser.error(f"{unknown[0]}: not one of {', '.join(ALL)}")
    if parsed.pages and parsed.names:
        parser.error("--pages runs no experiment: leave out the names")
    return parsed


def main() -> None:
    """Exit with a message if the command line is wrong, or if not all numbers are there yet."""
    asked = options(sys.argv[1:])
    if not asked.pages:
        measure(asked.names or list(ALL))
    if missing := [name for name in ALL if not numbers_path(name).exists()]:
        sys.exit(f"no pages yet: nothing was measured of {', '.join(missing)}")
    write_pages(RESULTS)
    write_live()


if __name__ == "__main__":
    main()
