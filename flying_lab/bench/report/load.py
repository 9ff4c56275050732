"""The contents of a directory of results: one replay, or several systems that replayed the same
workload.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec

from flying_lab.bench import switchlog
from flying_lab.bench.replay import RESULTS, SUMMARY, SWITCHES
from flying_lab.bench.switchlog import LoggedSwitch, Span, SwitchLog
from flying_lab.errors import BenchError
from flying_lab.results.metrics import summarise
from flying_lab.results.results import Results

COMPARISON = "compare.json"


class Started(msgspec.Struct, frozen=True):
    """The command line of a server, and the seconds until it was ready."""

    command: Annotated[list[str], msgspec.Meta(min_length=1)]
    ready_s: float


class _Comparison(msgspec.Struct, frozen=True):
    systems: dict[str, Started | None]


@dataclass(frozen=True)
class MeasuredSystem:
    """One system's replay: `log` is None for a server without one, `started` for one that bench did
    not start.
    """

    name: str
    results: Results
    summary: dict[str, Any]
    log: SwitchLog | None = None
    started: Started | None = None

    @cached_property
    def spans(self) -> list[Span]:
        """Return the system's layouts over time; none if they are not known."""
        return [] if self.log is None else switchlog.spans(self.log, self.results.run)

    @cached_property
    def switches(self) -> list[LoggedSwitch]:
        """Return the system's switches while the replay ran."""
        return [] if self.log is None else switchlog.during(self.log, self.results.run)


def comparison(path: Path) -> list[MeasuredSystem]:
    """Return the systems of a directory that `flying-serving bench` has written, in the order of
    their measurement.

    Raises:
        BenchError: if there are no results, or they cannot be read.
    """
    if (path / RESULTS).exists():
        return [_system(path.resolve().name, path, None)]
    kept = path / COMPARISON
    if kept.exists():
        try:
            systems = msgspec.json.decode(kept.read_bytes(), type=_Comparison).systems
        except (OSError, msgspec.DecodeError) as error:
            raise BenchError(
                f"{kept}: not written by `flying-serving bench --compare` ({error})"
            ) from None
        return [_system(name, path / name, started) for name, started in systems.items()]
    found = sorted(file.parent for file in path.glob(f"*/{RESULTS}"))
    if not found:
        raise BenchError(f"{path}: no {RESULTS} here or one directory below")
    return [_system(directory.name, directory, None) for directory in found]


def save_comparison(systems: Mapping[str, Started | None], path: Path) -> None:
    """Write how servers were started, None if they were not, in the order of their measurement."""
    text = msgspec.json.format(msgspec.json.encode(_Comparison(dict(systems))), indent=1)
    (path / COMPARISON).write_bytes(text + b"\n")


def _system(name: str, path: Path, started: Started | None) -> MeasuredSystem:
    results = Results.load(path / RESULTS)
    try:
        summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = summarise(results)  # the table has all figures but the goodput
    return MeasuredSystem(name, results, summary, switchlog.load(path / SWITCHES), started)
