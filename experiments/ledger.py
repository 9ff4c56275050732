"""Every row that a page of results has had: none goes without a reason.

docs/lab/results/numbers/rows.json lists the rows that were published, by page and heading; `python
-m experiments --pages` adds new ones and takes none away. removed.json beside it says of each that
is gone why: its keys are "PAGE / HEADING / ROW", or end with `*` for all that begin alike. The rows
of a table that is now a data file are looked for in that file.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from experiments.common import RESULTS

PUBLISHED, REMOVED = RESULTS / "numbers" / "rows.json", RESULTS / "numbers" / "removed.json"
CHAOS = ("results/chaos.md", "Engines that are killed and frozen: every case")
DATA_FILES = {CHAOS: RESULTS / "numbers" / "chaos.csv"}
"""Data files of the tables that have more than MAX_ROWS rows, by the page and the heading that had
the table. The page has the totals and every miss.
"""
MAX_ROWS = 60
"""Of a table on a page."""
Rows = dict[str, dict[str, list[str]]]
"""Names of rows by page and heading."""


def pages() -> dict[str, str]:
    """The text of each page of results, by its path below docs/."""
    paths = [RESULTS.parent / "results.md", *sorted(RESULTS.glob("*.md"))]
    return {
        str(path.relative_to(RESULTS.parent)): path.read_text(encoding="utf-8") for path in paths
    }


def rows_of(text: str) -> dict[str, list[str]]:
    """Names of the rows of all tables, by heading: of the leading cells, as many as tell the rows
    of a table apart.

    A name that a heading has in several tables is numbered from the second on.
    """
    found: dict[str, list[str]] = {}
    for heading, table in tables(text):
        names = found.setdefault(heading, [])
        seen = Counter(name.partition(" #")[0] for name in names)
        names += [f"{name} #{seen[name] + 1}" if seen[name] else name for name in _names(table)]
    return found


def tables(text: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield each table's heading and its rows' cells, without those that name the columns.

    An empty first cell stands for the one above.
    """
    heading, table = "", list[list[str]]()
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            first, *others = (
                cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")
            )
            table.append([first or (table[-1][0] if len(table) > 2 else ""), *others])
            continue
        if table:
            yield heading, table[2:]
            table = []
        if line.startswith("#"):
            heading = line.lstrip("# ")


def _names(table: Sequence[Sequence[str]]) -> list[str]:
    width = len(table[0]) if table else 0
    for count in range(1, width + 1):
        names = [", ".join(row[:count]) for row in table]
        if len(set(names)) == len(names):
            return names
    return sorted({", ".join(row) for row in table})


def keys(rows: Mapping[str, Mapping[str, Sequence[str]]]) -> set[str]:
    """Each row as removed.json names it."""
    return {
        " / ".join((page, heading, name))
        for page, headings in rows.items()
        for heading, names in headings.items()
        for name in names
    }


def rows_of_file(path: Path) -> list[str]:
    """Return the names of the rows of a data file."""
    with path.open(encoding="utf-8", newline="") as file:
        _, *rows = csv.reader(file)
    return _names(rows)


def present() -> Rows:
    """Return what the pages and the data files of their tables have now."""
    rows = {page: rows_of(text) for page, text in pages().items()}
    for (page, heading), path in DATA_FILES.items():
        rows[page][heading] = rows_of_file(path)
    return rows


def published(path: Path = PUBLISHED) -> Rows:
    """What pages have had."""
    found: Rows = json.loads(path.read_text(encoding="utf-8"))
    return found


def removed(path: Path = REMOVED) -> dict[str, str]:
    """Why rows are gone, by key."""
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return found


def missing(published: set[str], present: set[str], removed: Mapping[str, str]) -> list[str]:
    """Rows that are gone without a reason."""
    whole = set(removed)
    begins = tuple(key[:-1] for key in removed if key.endswith("*"))
    return sorted(key for key in published - present - whole if not key.startswith(begins))


def enter() -> None:
    """Add what the pages have now to what was published."""
    found = published() if PUBLISHED.exists() else {}
    for page, headings in present().items():
        for heading, names in headings.items():
            had = found.setdefault(page, {}).setdefault(heading, [])
            had += [name for name in names if name not in had]
    PUBLISHED.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
