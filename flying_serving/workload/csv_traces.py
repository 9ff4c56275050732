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
    times, lengths, before = [], [], None
    for number, row in _rows(lines, file, is_azure, AZURE):
        at = _clock_ns(row["TIMESTAMP"], file, number)
        if before is not None and at < before:
            allowed = "not before the row before it"
            raise WorkloadError("TIMESTAMP", row["TIMESTAMP"], allowed, file=file, line=number)
        before = at
        times.append(at)
        lengths.append(_lengths(row, "ContextTokens", "GeneratedTokens", file, number))
    return [
        Request(index, (at - times[0]) / 1e9, prompt, output)
        for index, (at, (prompt, output)) in enumerate(zip(times, lengths, strict=True))
    ]


def burstgpt(lines: Lines, file: str, seed: int) -> list[Request]:
    """Requests of a BurstGPT trace; the first second is 0. Times in whole seconds are spread within their second."""
    times: list[float] = []
    lengths = []
    for number, row in _rows(lines, file, is_burstgpt, BURSTGPT):
        at = _decimal(row["Timestamp"], "Timestamp", file, number)
        if times and at < times[-1]:
            allowed = f"not before the row before it ({times[-1]})"
            raise WorkloadError("Timestamp", row["Timestamp"], allowed, file=file, line=number)
        times.append(at)
        prompt, output = _lengths(row, "Request tokens", "Response tokens", file, number)
        total = row["Total tokens"].strip()
        if total != str(prompt + output):
            allowed = f"{prompt + output}, the sum of request and response tokens"
            raise WorkloadError("Total tokens", total, allowed, file=file, line=number)
        lengths.append((prompt, output))
    times = [at - times[0] for at in times]
    if all(at.is_integer() for at in times):
        times = spread(times, 1.0, seed)
    return [
        Request(index, at, prompt, output)
        for index, (at, (prompt, output)) in enumerate(zip(times, lengths, strict=True))
    ]


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
        try:
            cells = next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise WorkloadError("row", line, f"comma-separated cells ({error})", file=file, line=number) from None
        if len(cells) != len(names):
            allowed = f"{len(names)} cells, as in the header ({','.join(names)})"
            raise WorkloadError("row", line, allowed, file=file, line=number)
        yield number, dict(zip(names, cells, strict=True))
    if number == before:
        raise WorkloadError("file", first, "rows below the header", file=file, line=number)


def _lengths(row: Row, prompt: str, output: str, file: str, line: int) -> tuple[int, int]:
    """Prompt and output tokens of a row, both at least 1."""
    return _tokens(row[prompt], prompt, file, line), _tokens(row[output], output, file, line)


def _tokens(cell: str, column: str, file: str, line: int) -> int:
    cell = cell.strip()
    if not _WHOLE.fullmatch(cell) or not 1 <= int(cell) <= MAX_TOKENS:
        allowed = f"a whole number of tokens, 1 to {MAX_TOKENS}"
        if column == "Response tokens" and cell == "0":
            allowed += " (a failed request; the files `without_fails` have none)"
        raise WorkloadError(column, cell, allowed, file=file, line=line)
    return int(cell)


def _decimal(cell: str, column: str, file: str, line: int) -> float:
    cell = cell.strip()
    if not _DECIMAL.fullmatch(cell):
        raise WorkloadError(column, cell, "seconds, a number of at least 0", file=file, line=line)
    return float(cell)


def _clock_ns(cell: str, file: str, line: int) -> int:
    """Nanoseconds of a wall-clock time; Azure writes seven decimals, more than a datetime holds."""
    found = _CLOCK.fullmatch(cell.strip())
    try:
        if found is None:
            raise ValueError
        zone = (found[3] or "Z").replace("Z", "+00:00")
        seconds = (datetime.fromisoformat(found[1] + zone) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)
    except ValueError:
        allowed = "a time like 2023-11-16 18:17:03.9799600"
        raise WorkloadError("TIMESTAMP", cell, allowed, file=file, line=line) from None
    return seconds * 10**9 + int((found[2] or "").ljust(9, "0"))
