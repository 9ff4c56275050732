"""Command lines of live comparisons: the flags that they share."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path


def comparison(
    description: str | None, systems: Collection[str], rounds: int, out: Path
) -> argparse.ArgumentParser:
    """Return the parser of a comparison in rounds.

    Args:
        description: for --help, with its line ends.
        systems: names of all that can be compared; by default all are.
        rounds: the default.
        out: the file of rows by default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--systems", nargs="+", choices=list(systems), default=list(systems))
    parser.add_argument("--out", type=Path, default=out)
    return parser


def emulated(
    description: str | None, systems: Collection[str], rounds: int, out: Path
) -> argparse.ArgumentParser:
    """Return the parser of a comparison in rounds on emulated devices, likewise."""
    parser = comparison(description, systems, rounds, out)
    parser.add_argument("--slowdown", type=float, default=2.0)
    parser.add_argument("--execution", choices=("graph", "eager"), default="graph")
    return parser
