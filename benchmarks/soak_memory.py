"""What the processes of a server hold, by their kind: at first, at last, and what an hour adds.

`python -m benchmarks.soak_memory FILE` shows what `python -m benchmarks.soak --samples FILE` noted.
Memory is the proportional set size: a page that several processes share counts in parts. Processes
that were forked share pages until one of them writes, and then that one has a copy of its own. So a
process may grow by copies alone: then its proportional part of anonymous memory grows, and the
anonymous memory that is resident (`Anonymous`) does not.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.server_watch import held_mib

ALL, PARTS = "Pss", ("Pss_Anon", "Pss_File", "Pss_Shmem", "Anonymous")
"""The kernel's names in `smaps_rollup`."""
COLUMNS = (
    *("processes", "first", "last", "an hour: all"),
    *("anonymous", "files", "shared", "resident anonymous"),
)
API_SERVER, ENGINE, OTHERS = KINDS = "API server", "engine", "others"
AGES_S = (60, 120, 300, 600, 1200, 1800, 2700)
"""An engine's memory grows with its age: so it is also shown by age, between these and above."""


@dataclass(frozen=True)
class Held:
    """What one process holds at a time: MiB by the kernel's name, and descriptors."""

    kind: str
    pid: int
    age_s: float
    descriptors: int
    mib: Mapping[str, float]


@dataclass(frozen=True)
class Sample:
    """What all processes of a server hold, `at_s` seconds after the load began."""

    at_s: float
    processes: Sequence[Held]

    def mib(self, part: str = ALL, kind: str | None = None) -> float:
        """The sum over all processes, or those of a kind."""
        return sum(one.mib[part] for one in self.processes if kind in (None, one.kind))

    def count(self, kind: str) -> int:
        """How many processes of a kind there are."""
        return sum(one.kind == kind for one in self.processes)

    @property
    def descriptors(self) -> int:
        """Of all processes."""
        return sum(one.descriptors for one in self.processes)


def take(server: int, at_s: float) -> Sample:
    """Look at all processes of a server, whose first one is `server`."""
    root = psutil.Process(server)
    return Sample(at_s, list(_held(root, [root, *root.children(recursive=True)])))


def _held(root: psutil.Process, processes: Iterable[psutil.Process]) -> Iterator[Held]:
    for one in processes:
        with suppress(psutil.Error, OSError):  # it may end meanwhile
            mib = held_mib(one.pid)
            age_s = time.time() - one.create_time()
            kind = API_SERVER if one == root else _kind(one.cmdline())
            kept = {part: mib[part] for part in (ALL, *PARTS)}
            yield Held(kind, one.pid, age_s, one.num_fds(), kept)


def _kind(command: Sequence[str]) -> str:
    return ENGINE if "EngineCore" in " ".join(command) else OTHERS


def append(sample: Sample, path: Path) -> None:
    """Add a sample to a file, as a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{json.dumps(asdict(sample))}\n")


def read(path: Path) -> list[Sample]:
    """The samples of a file."""
    found = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [Sample(one["at_s"], [Held(**held) for held in one["processes"]]) for one in found]


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """The medians of the second and of the last third: at first, caches fill."""
    third = len(values) // 3
    return statistics.median(values[third : 2 * third]), statistics.median(values[-third:])


def per_hour(samples: Sequence[Sample], values: Sequence[float]) -> float:
    """By how much values of samples grow in an hour, from the second third to the last."""
    (began_s, ended_s), (before, after) = thirds([one.at_s for one in samples]), thirds(values)
    return (after - before) / (ended_s - began_s) * 3600


def table(samples: Sequence[Sample]) -> Iterator[str]:
    """A row for each kind of process, and one for all, in MiB."""
    yield f"| MiB (PSS) | {' | '.join(COLUMNS)} |"
    yield "|---" * (1 + len(COLUMNS)) + "|"
    for kind in (*KINDS, None):
        held = [one.mib(kind=kind) for one in samples]
        counts = {str(one.count(kind) if kind else len(one.processes)) for one in samples[-1:]}
        grown = [
            per_hour(samples, [one.mib(part, kind) for one in samples]) for part in (ALL, *PARTS)
        ]
        ends = [f"{held[0]:.0f}", f"{held[-1]:.0f}"]
        cells = [*counts, *ends, *(f"{value:+.0f}" for value in grown)]
        yield f"| {kind or 'all'} | {' | '.join(cells)} |"


def by_age(samples: Sequence[Sample], part: str = ALL) -> Iterator[str]:
    """MiB of an engine, the median by its age."""
    engines = [one for sample in samples for one in sample.processes if one.kind == ENGINE]
    for least_s, most_s in pairwise((0, *AGES_S, math.inf)):
        found = [one.mib[part] for one in engines if least_s < one.age_s <= most_s]
        if found:
            yield f"{statistics.median(found):.0f} from {least_s} s on"


def report(samples: Sequence[Sample]) -> Iterator[str]:
    """The table, an engine by its age, and descriptors; nothing of fewer than three samples."""
    if len(samples) < 3:
        return
    yield from table(samples)
    for part, name in ((ALL, "PSS"), ("Anonymous", "resident anonymous")):
        yield f"an engine ({name}), median by age: {', '.join(by_age(samples, part))}"
    grown = per_hour(samples, [one.descriptors for one in samples])
    first, last = samples[0].descriptors, samples[-1].descriptors
    yield f"descriptors: {first} at first, {last} at last, {grown:+.1f} an hour"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="what a soak noted with --samples")
    print(*report(read(parser.parse_args().file)), sep="\n")


if __name__ == "__main__":
    main()
