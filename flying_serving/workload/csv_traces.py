"""Traces in CSV: Azure's and BurstGPT's.

Sources of the columns: github.com/Azure/AzurePublicDataset (AzureLLMInferenceDataset2023.md) and
github.com/HPMLL/BurstGPT (README.md, Schema).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta

from flying_serving.errors import WorkloadError
from flying_serving.workload.lines import located
from flying_serving.workload.model import MAX_TOKENS, Request
from flying_serving.workload.times import spread

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type")
BURSTGPT_LATER = ("Session ID", "SessionID", "Elapsed time")
"""Columns that later releases of BurstGPT have as well."""

_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_DECIMAL = re.compile(r"\d{1,15}(\.\d{0,9})?", re.ASCII)
_WHOLE = re.compile(r"\d{1,15}", re.ASCII)

Lines = Iterable[tuple[int, str]]
Row = dict[str, str]
Parsed = tuple[float, tuple[int, int]]
"""Time of a row, and its (prompt tokens, output tokens)."""


def header(line: str) -> tuple[str, ...]:
    """The column names in the first line of a CSV file."""
    return tuple(name.strip() for name in line.split(","))


def is_azure(names: tuple[str, ...]) -> bool:
    """Whether these are the columns of an Azure trace."""
    return sorted(names) == sorted(AZURE)


def is_burstgpt(names: tuple[str, ...]) -> bool:
    """Whether these are the columns of a BurstGPT trace."""
    return set(BURSTGPT) <= set(names) <= {*BURSTGPT, *BURSTGPT_LATER} and len(set(names)) == len(names)


def azure(lines: Lines, file: str) -> list[Request]:
    """Requests of an Azure trace, from its lines, the header among them; the first arrives at 0."""

    def parse(row: Row) -> Parsed:
        return _clock_ns(row["TIMESTAMP"]), (_tokens(row, "ContextTokens"), _tokens(row, "GeneratedTokens"))

    parsed = _parsed(_rows(lines, file, is_azure, AZURE), file, "TIMESTAMP", parse)
    start = parsed[0][0]
    return [Request(index, (at - start) / 1e9, *lengths) for index, (at, lengths) in enumerate(parsed)]


def burstgpt(lines: Lines, file: str, seed: int) -> list[Request]:
    """Requests of a BurstGPT trace; the first second is 0. Times in whole seconds are spread within their second."""

    def parse(row: Row) -> Parsed:
        at_s = _decimal(row, "Timestamp")
        prompt, output = _tokens(row, "Request tokens"), _tokens(row, "Response tokens")
        total = row["Total tokens"].strip()
        if total != str(prompt + output):
            raise WorkloadError("Total tokens", total, f"{prompt + output}, the sum of request and response tokens")
        return at_s, (prompt, output)

    parsed = _parsed(_rows(lines, file, is_burstgpt, BURSTGPT), file, "Timestamp", parse)
    times = [at - parsed[0][0] for at, _ in parsed]
    if all(at.is_integer() for at in times):
        times = spread(times, 1.0, seed)
    return [Request(index, at, *lengths) for index, (at, (_, lengths)) in enumerate(zip(times, parsed, strict=True))]


def _parsed(rows: Iterable[tuple[int, Row]], file: str, time: str, parse: Callable[[Row], Parsed]) -> list[Parsed]:
    """Time, prompt and output tokens of each row; `time` names the column that must not descend."""
    found: list[Parsed] = []
    for number, row in rows:
        with located(file, number):
            one = parse(row)
            if found and one[0] < found[-1][0]:
                raise WorkloadError(time, row[time], "not before the row before it")
        found.append(one)
    return found


def _rows(
    lines: Lines, file: str, known: Callable[[tuple[str, ...]], bool], columns: tuple[str, ...]
) -> Iterator[tuple[int, Row]]:
    """The rows below the header, each with its line number.

    Raises:
        WorkloadError: if the header is another one, there are no rows, or one has not as many cells as the header.
    """
    numbered = iter(lines)
    number, first = next(numbered)
    names = header(first)
    if not known(names):
        raise WorkloadError("header", first, f"the columns {','.join(columns)}", file=file, line=number)
    before = number
    for number, line in numbered:
        with located(file, number):
            try:
                cells = next(csv.reader([line], strict=True))
            except csv.Error as error:
                raise WorkloadError("row", line, f"comma-separated cells ({error})") from None
            if len(cells) != len(names):
                raise WorkloadError("row", line, f"{len(names)} cells, as in the header ({','.join(names)})")
        yield number, dict(zip(names, cells, strict=True))
    if number == before:
        raise WorkloadError("file", first, "rows below the header", file=file, line=number)


def _tokens(row: Row, column: str) -> int:
    cell = row[column].strip()
    if not _WHOLE.fullmatch(cell) or not 1 <= int(cell) <= MAX_TOKENS:
        allowed = f"a whole number of tokens, 1 to {MAX_TOKENS}"
        if column == "Response tokens" and cell == "0":
            allowed += " (a failed request; the files `without_fails` have none)"
        raise WorkloadError(column, cell, allowed)
    return int(cell)


def _decimal(row: Row, column: str) -> float:
    cell = row[column].strip()
    if not _DECIMAL.fullmatch(cell):
        raise WorkloadError(column, cell, "seconds, a number of at least 0")
    return float(cell)


def _clock_ns(cell: str) -> int:
    """Nanoseconds of a wall-clock time; Azure writes seven decimals, more than a datetime holds."""
    found = _CLOCK.fullmatch(cell.strip())
    try:
        if found is None:
            raise ValueError
        zone = (found[3] or "Z").replace("Z", "+00:00")
        seconds = (datetime.fromisoformat(found[1] + zone) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)
    except ValueError:
        raise WorkloadError("TIMESTAMP", cell, "a time like 2023-11-16 18:17:03.9799600") from None
    return seconds * 10**9 + int((found[2] or "").ljust(9, "0"))
