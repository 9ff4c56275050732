"""Pages of live measurements: docs/lab/results.md, and the section of docs/benchmarks.md.

Their numbers are the rows of docs/lab/results/numbers/live.json, their prose is in
templates/results.md and templates/measured.md. What a template has in double braces is replaced:

- `{{run KEY}}`: a run: how it was measured, and its rows;
- `{{command KEY}}`, `{{commit KEY}}`: of a run, as it is;
- `{{table KEY | COLUMN; COLUMN}}`: rows of a run, without their spread;
- `{{KEY | ROW | COLUMN}}`: one number, without its spread;
- `{{KEY | ROW over ROW | COLUMN}}`: the ratio of two;
- a name that the module of a page gives (`chaos_page.py`): its value.

Paragraphs are wrapped again.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from experiments.common import RESULTS, ROOT, TEMPLATES
from experiments.rows import markdown, paragraph
from flying_serving.errors import ConfigError

PATH = RESULTS / "numbers" / "live.json"
PAGE = ROOT / "docs" / "lab" / "results.md"
BENCHMARKS, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
"""Pages with a section between BEGIN and END."""
BEGIN, END = "<!-- Written by `make experiments ARGS=--pages`: begin -->", "<!-- end -->"
AT = {
    "measured": "Commit",
    "recorded": "The measured commit was not noted; recorded in",
    "before": "The measured commit was not noted; before",
    "between": "No commit has what was measured; before and after it:",
}
"""What a run's commits are."""
RULE = ("724c096", "2026-11-28")
"""The last commit, with its date, that changed how `auto` decides if no request is urgent."""
WIDTH = 120
NO_VALUES: Mapping[str, str] = {}
_WHOLE = {"break_long_words": False, "break_on_hyphens": False}
_PLACE = re.compile(r"\{\{(.+?)\}\}")
_NUMBER = re.compile(r"[^\[(]*?(?= ?[\[(]|$)")
_WORD = re.compile(r"(run|command|commit|table) ")


@dataclass(frozen=True)
class Run:
    """One measurement.

    Args:
        title: what was measured.
        command: that measures it; None if it was not noted.
        commits: with their dates; a date is empty if the history lacks the commit.
        commit_is: a key of AT.
        columns: the first is that of the rows' names.
        rows: figures as they were published, by name.
        rounds, setting, beside: how; empty if nothing is known.
        summary: whether its rows are figures of other runs, which have the commands.
        of_auto: whether decisions of policy `auto` enter its rows.
    """

    title: str
    command: str | None
    commits: Sequence[tuple[str, str]]
    commit_is: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[str]]
    rounds: str = ""
    setting: str = ""
    beside: str = ""
    summary: bool = False
    of_auto: bool = False

    @property
    def is_older(self) -> bool:
        """Whether all of its commits are older than the present rule of `auto`."""
        return all(date < RULE[1] for _, date in self.commits)

    def cell(self, row: str, column: str) -> str:
        """A figure without its spread and bar. Raises ConfigError, naming what there is."""
        if row not in self.rows:
            raise ConfigError(f"row={row!r}: not one of {', '.join(self.rows)}")
        if column not in self.columns[1:]:
            raise ConfigError(f"column={column!r}: not one of {', '.join(self.columns[1:])}")
        return _NUMBER.match(self.rows[row][self.columns.index(column) - 1])[0]


def read(path: Path = PATH) -> tuple[dict[str, Run], dict[str, str]]:
    """Every run by its key; and the commits that the history lacks, with what is known of each."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return {key: _run(one) for key, one in found["runs"].items()}, found["lost_commits"]


def _run(one: Mapping[str, Any]) -> Run:
    commits = [(commit["commit"], commit.get("date", "")) for commit in one["commits"]]
    return Run(**{**one, "commits": commits})


def page() -> str:
    """docs/lab/results.md."""
    runs, _ = read()
    older = [one for one in runs.values() if one.is_older]
    return filled(
        "results",
        {
            "runs": str(len(runs)),
            "older": str(len(older)),
            "older of auto": str(sum(one.of_auto for one in older)),
            "of auto": str(sum(one.of_auto for one in runs.values())),
            "rule": " of ".join(RULE),
        },
    )


def section(values: Mapping[str, str]) -> str:
    """Return the section of docs/benchmarks.md; `values` as of `filled`."""
    return filled("measured", values)


def between_marks(text: str, inner: str) -> str:
    """Return a page with `inner` between its marks, in the place of what was there."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{inner}{END}{rest.split(END, 1)[1]}"


def filled(name: str, values: Mapping[str, str] = NO_VALUES) -> str:
    """Return a template with a value in each place.

    Args:
        name: of the template.
        values: of the places of this page alone, by what stands between the braces.
    """
    runs, lost = read()

    def value(match: re.Match[str]) -> str:
        place = match[1].strip()
        return values[place] if place in values else _value(place, runs, lost)

    text = (TEMPLATES / f"{name}.md").read_text(encoding="utf-8")
    blocks = [_PLACE.sub(value, block) for block in text.split("\n\n")]
    return "\n\n".join(_wrapped(block) for block in blocks if block.strip()).rstrip() + "\n"


def _wrapped(block: str) -> str:
    """A paragraph or a list in lines of one width; headings, tables, code and runs as they are."""
    if block.lstrip("\n").startswith(("#", "|", "    ")):
        return block
    items = re.split(r"\n(?=- )", block.strip("\n"))
    return "\n".join(
        textwrap.fill(
            " ".join(item.split()), WIDTH, subsequent_indent="  " * item.startswith("- "), **_WHOLE
        )
        for item in items
    )


def _value(place: str, runs: Mapping[str, Run], lost: Mapping[str, str]) -> str:
    if not _WORD.match(place):
        return _number(place, runs)
    word, _, rest = place.partition(" ")
    key, _, columns = (part.strip() for part in rest.partition("|"))
    run = runs[key]
    match word:
        case "run":
            return "\n".join(_shown(key, run, lost)).rstrip()
        case "command":
            return run.command or "not noted"
        case "commit":
            return _commits(run, lost)
        case _:
            names = [column.strip() for column in columns.split(";")]
            cells = [[row, *(run.cell(row, name) for name in names)] for row in run.rows]
            return "\n".join(markdown(["", *names], cells)).rstrip()


def _number(place: str, runs: Mapping[str, Run]) -> str:
    key, row, column = (part.strip() for part in place.split("|"))
    top, _, bottom = (part.strip() for part in row.partition(" over "))
    value = runs[key].cell(top, column)
    return _ratio(value, runs[key].cell(bottom, column)) if bottom else value


def _ratio(top: str, bottom: str) -> str:
    """As by hand: a half is rounded up."""
    return str((Decimal(top) / Decimal(bottom)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def _shown(key: str, run: Run, lost: Mapping[str, str]) -> list[str]:
    """How a run was measured, and its rows."""
    unknown = (
        "Commands and rounds: as each run says" if run.summary else "The command was not noted"
    )
    command = f"`{run.command}`" if run.command else unknown
    beside = f"Running beside it: {run.beside}" if run.beside else ""
    older = "**Of a rule of `auto` that is gone**" if run.of_auto and run.is_older else ""
    how = [
        older,
        command,
        f"{AT[run.commit_is]} {_commits(run, lost)}",
        run.rounds,
        run.setting,
        beside,
    ]
    said = " ".join(f"{part[0].upper()}{part[1:]}." for part in how if part)
    return [f"### {key}: {run.title}", "", *paragraph(said), *markdown(run.columns, _cells(run))]


def _cells(run: Run) -> list[list[str]]:
    return [[name, *figures] for name, figures in run.rows.items()]


def _commits(run: Run, lost: Mapping[str, str]) -> str:
    return ", ".join(
        f"{commit} of {date}" if date else f"{commit} ({lost[commit]})"
        for commit, date in run.commits
    )
