"""Compute docs/lab/results/numbers/earlier_runs.json again: what every published run of a load has
shown, from the numbers that git has of it.

    python -m experiments.earlier_runs
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from experiments import held_out_ratios, loads, phases, run_history
from experiments.common import git, kept_in

COMMITS = {
    "phases": ("6d9ad65", "c889c1f", "c84f3db", "8e342f2", "74c92ce0", "4ccb1d61"),
    "held_out": ("3565ed9", "235d5c2", "8e342f2", "74c92ce0", "4ccb1d61"),
    "loads": ("4ccb1d61",),
}
"""The commits that have published a run, the first one first. A run is entered here when a later
one replaces it.
"""
CELLS = {
    "phases": phases.run_cells,
    "held_out": held_out_ratios.run_cells,
    "loads": loads.run_cells,
}
FOLDERS = ("docs/lab/results/numbers", "docs/results/numbers")
"""Where commits have their numbers, the present folder first."""


def published(name: str, commit: str) -> dict[str, Any]:
    """Return what a commit has published of an experiment."""
    paths = (f"{folder}/{name}.json" for folder in FOLDERS)
    path = next(path for path in paths if git("ls-tree", "--name-only", commit, path))
    found = kept_in(json.loads(renamed(git("show", f"{commit}:{path}"))))
    return {"commit": found.commit, "date": found.date, "cells": CELLS[name](found)}


def renamed(text: str) -> str:
    """Return numbers with the present names of systems.

    Before 2026-11-29 the names of stock vLLM began with `static-`, and those of our own fixed
    layouts with `pinned-`.
    """
    if '"stock-' in text:
        return text
    return text.replace('"static-', '"stock-').replace('"pinned-', '"static-')


def main() -> None:
    """Read every run from git."""
    argparse.ArgumentParser(
        "python -m experiments.earlier_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    every = {
        name: [published(name, commit) for commit in commits] for name, commits in COMMITS.items()
    }
    run_history.PATH.write_text(json.dumps(every, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
