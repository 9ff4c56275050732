"""The four walks: the files of the product that each enters, as they were recorded.

A walk has the functions that all processes of a server enter while it goes on, in each of some
rounds, without those that they enter anyway: `Walk.without`. A function that its table in
docs/architecture.md names is of the walk in any case.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = Path(__file__).with_name("walks.json")
NEEDED_STATEMENTS = 5
"""A file is needed to explain a walk if the walk's functions in it have so many statements. The
others hand on, or are words of the walk.
"""

Entered = Mapping[tuple[str, str], float]
"""When a function was first entered, by its file below flying_serving and its qualified name."""
Recording = Mapping[str, Sequence[Entered]]
"""What was entered in each round of a window, by the window's name."""
Statements = Mapping[tuple[str, str], int]
"""The statements of each function."""


@dataclass(frozen=True)
class Walk:
    """A walk, and the window in which it is recorded.

    `heading`: of its table in docs/architecture.md. `without`: windows whose functions are left
    out.
    """

    name: str
    heading: str
    window: str
    without: tuple[str, ...]


_REQUESTS = ("idle", "request alone", "request in a group")
WALKS = (
    Walk("request", "A request, from HTTP to token", "request in a group", ("idle",)),
    Walk("switch", "A layout switch", "switch by auto", _REQUESTS),
    Walk("migration", "A migrating request", "migration", (*_REQUESTS, "order")),
    Walk("loss", "An engine that dies", "loss", ("start", *_REQUESTS, "order", "migration")),
)


@dataclass(frozen=True)
class File:
    """A file of a walk: the functions that were entered in each round, and their statements."""

    path: str
    functions: tuple[str, ...]
    statements: int

    @property
    def is_needed(self) -> bool:
        """True if more than a few statements of it are on the walk."""
        return self.statements >= NEEDED_STATEMENTS


@dataclass(frozen=True)
class Record:
    """What a walk has entered.

    `files`: in the order in which they were entered. `sometimes`: files that were entered in some
    rounds only, which do not count.
    """

    files: tuple[File, ...]
    sometimes: tuple[str, ...]

    @property
    def needed(self) -> int:
        """The number of files that are needed to explain the walk."""
        return sum(file.is_needed for file in self.files)


def record_of(
    walk: Walk, recording: Recording, sizes: Statements, named: Iterable[tuple[str, str]]
) -> Record:
    """Return the record of a walk.

    `sizes`: of all functions of the product. `named`: what the page's table names.
    """
    rounds = recording[walk.window]
    anyway = {
        function for window in walk.without for entered in recording[window] for function in entered
    }
    named = set(named)
    own = [
        {
            function: at
            for function, at in entered.items()
            if function in sizes and (function not in anyway or _is_named(function, named))
        }
        for entered in rounds
    ]
    always = set.intersection(*(set(entered) for entered in own))
    by_file: defaultdict[str, list[str]] = defaultdict(list)
    for path, name in sorted(always, key=own[0].__getitem__):
        by_file[path].append(name)
    ever = {path for entered in own for path, _ in entered}
    files = (
        File(path, tuple(names), sum(sizes[path, name] for name in names))
        for path, names in by_file.items()
    )
    return Record(tuple(files), tuple(sorted(ever - set(by_file))))


def _is_named(function: tuple[str, str], named: set[tuple[str, str]]) -> bool:
    path, name = function
    parts = name.split(".")
    return bool({(path, parts[0]), (path, parts[-1])} & named)


def load() -> dict[str, Record]:
    """Return the kept records by the walks' names."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: Record(
            tuple(
                File(file["path"], tuple(file["functions"]), file["statements"])
                for file in row["files"]
            ),
            tuple(row["sometimes"]),
        )
        for name, row in rows.items()
    }


def save(records: Mapping[str, Record]) -> None:
    """Keep records in place of those that are kept: a line for each file."""
    rows = (
        f'"{name}": {{"sometimes": {json.dumps(record.sometimes)}, "files": [\n '
        + ",\n ".join(json.dumps(asdict(file)) for file in record.files)
        + "]}"
        for name, record in records.items()
    )
    FILE.write_text("{" + ",\n".join(rows) + "}\n", encoding="utf-8")
