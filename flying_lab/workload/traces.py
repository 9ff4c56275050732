"""Published traces: a table of formats, and one reader for all of them.

Sources: github.com/Azure/AzurePublicDataset (AzureLLMInferenceDataset2023.md),
github.com/HPMLL/BurstGPT (README.md, Schema), github.com/kvcache-ai/Mooncake, and `vllm bench serve
--dataset-name timed_trace`, which waits for the first timestamp as for any other. Mooncake's rows
and a timed trace's have the same columns and differ in their units.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np

from flying_lab.errors import WorkloadError
from flying_lab.workload.model import (
    MAX_HASH_ID,
    MAX_TOKENS,
    MOONCAKE_BLOCK_TOKENS,
    Request,
    blocks_of,
    check_blocks,
)
from flying_lab.workload.rows import checked, located

_CLOCK = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?", re.ASCII)
Lines = Iterable[tuple[int, str]]
Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
HashId = Annotated[int, msgspec.Meta(ge=0, le=MAX_HASH_ID)]


class Row(msgspec.Struct, frozen=True):
    """A row of a trace; other columns, like `chat_id`, mean nothing to a replay."""

    timestamp: Any
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[HashId, ...] = ()


class HashedRow(Row, frozen=True):
    """A row of a trace in JSONL, with hash ids."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    hash_ids: Annotated[tuple[HashId, ...], msgspec.Meta(min_length=1)]


_AZURE = {
    "timestamp": "TIMESTAMP",
    "input_length": "ContextTokens",
    "output_length": "GeneratedTokens",
}
_BURSTGPT = {
    "timestamp": "Timestamp",
    "input_length": "Request tokens",
    "output_length": "Response tokens",
}


class Clock(Decimal):
    """Seconds since the epoch of a wall-clock time; Azure writes seven decimals, more than a
    datetime holds.
    """

    @classmethod
    def parse(cls, _: type, cell: str) -> Clock:
        """Read a time in the form that Azure writes."""
        found = _CLOCK.fullmatch(cell)
        try:
            if found is None:
                raise ValueError
            zone = (found[3] or "Z").replace("Z", "+00:00")
            passed = datetime.fromisoformat(found[1] + zone).astimezone(UTC) - datetime(
                1970, 1, 1, tzinfo=UTC
            )
        except (ValueError, OverflowError):  # a time zone can lead beyond the range of a datetime
            raise WorkloadError(
                "TIMESTAMP", cell, "a time like 2023-11-16 18:17:03.9799600"
            ) from None
        return cls(passed // timedelta(seconds=1) + Decimal(found[2] or 0))

    def __repr__(self) -> str:
        second = math.floor(self)
        return str(
            datetime.fromtimestamp(second, UTC).replace(
                microsecond=int((self - second) * 1_000_000)
            )
        )


class AzureRow(Row, frozen=True, rename=_AZURE):
    """A row of Azure's CSV."""

    timestamp: Clock
    input_length: Tokens
    output_length: Tokens


class BurstGPTRow(Row, frozen=True, rename=_BURSTGPT | {"total": "Total tokens"}):
    """A row of BurstGPT's CSV."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Tokens
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]
    total: int = 0

    def __post_init__(self) -> None:
        """Reject failed requests and sums that do not add up."""
        if self.output_length == 0:
            allowed = "at least 1 token (a failed request; the files `without_fails` have none)"
            raise WorkloadError("Response tokens", 0, allowed)
        tokens = self.input_length + self.output_length
        if self.total != tokens:
            raise WorkloadError(
                "Total tokens", self.total, f"{tokens}, the sum of request and response tokens"
            )


@dataclass(frozen=True)
class TraceFormat:
    """The form of the rows of a trace.

    Args:
        row: the type of a row.
        columns: in the order of the header, if it is CSV.
        later_columns: columns that later releases have as well.
        seconds: seconds of one unit of a timestamp.
        block_tokens: tokens that one hash id stands for.
        bin_s: how far times were rounded down.
        from_first: time 0 is the first timestamp, not timestamp 0.
    """

    row: type[Row]
    columns: tuple[str, ...] = ("timestamp", "input_length", "output_length", "hash_ids")
    later_columns: tuple[str, ...] = ()
    seconds: float = 1
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    bin_s: float = 0.0
    from_first: bool = True

    @property
    def is_csv(self) -> bool:
        """True if the first line is a header."""
        return self.row is not HashedRow

    def is_header(self, line: str) -> bool:
        """Return whether a line names these columns, each once."""
        names = header(line)
        known = {*self.columns, *self.later_columns}
        return set(self.columns) <= set(names) <= known and len(set(names)) == len(names)


FORMATS: Mapping[str, TraceFormat] = {
    "azure": TraceFormat(AzureRow, tuple(_AZURE.values())),
    "burstgpt": TraceFormat(
        BurstGPTRow,
        ("Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"),
        ("Session ID", "SessionID", "Elapsed time"),
        bin_s=1.0,
    ),
    "mooncake": TraceFormat(HashedRow, seconds=0.001, bin_s=3.0),
    "timed_trace": TraceFormat(HashedRow, block_tokens=16, from_first=False),
}


def header(line: str) -> list[str]:
    """Return the column names in the first line of a CSV file."""
    return [name.strip() for name in line.split(",")]


def read(lines: Lines, file: str, form: TraceFormat, seed: int) -> list[Request]:
    """Return the requests of a trace, from its lines, a header among them. The seed spreads rounded
    times in their bins.

    Raises:
        WorkloadError: with file, line, column and value.
    """
    found: list[Row] = []
    column = form.columns[0]
    for number, row in rows(lines, file, form):
        with located(file, number):
            if found and row.timestamp < found[-1].timestamp:
                raise WorkloadError(
                    column, row.timestamp, f"not before the row before it ({found[-1].timestamp!r})"
                )
            if not math.isfinite(row.timestamp * form.seconds):
                raise WorkloadError(
                    column, row.timestamp, f"a finite number when multiplied by {form.seconds:g}"
                )
            check_blocks(_request(0, 0.0, row), form.block_tokens)
        found.append(row)
    start = found[0].timestamp if form.from_first else 0
    times = [float((row.timestamp - start) * form.seconds) for row in found]
    if form.bin_s and (form is not FORMATS["burstgpt"] or all(map(float.is_integer, times))):
        times = spread(times, form.bin_s, seed)
    return [
        _request(index, at_s, row)
        for index, (at_s, row) in enumerate(zip(times, found, strict=True))
    ]


def guess_units(lines: Lines, file: str) -> str:
    """Return whether rows are Mooncake's or a timed trace's, by how many tokens one hash id covers.

    Raises:
        WorkloadError: if the first row that tells them apart is neither, or none of these lines
            tells.
    """
    forms = {name: form.block_tokens for name, form in FORMATS.items() if not form.is_csv}
    number = 0
    for number, row in rows(lines, file, FORMATS["mooncake"]):
        blocks = {name: blocks_of(row.input_length, tokens) for name, tokens in forms.items()}
        fitting = [name for name, count in blocks.items() if len(row.hash_ids) == count]
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            sizes = " or ".join(map(str, blocks.values()))
            allowed = (
                f"{sizes} ids for {row.input_length} tokens (in blocks of 512 or 16); "
                "name format and block size"
            )
            raise WorkloadError(
                "hash_ids", f"{len(row.hash_ids)} ids", allowed, file=file, line=number
            )
    allowed = (
        "prompts of more than 16 tokens; these may be Mooncake's or a timed trace's: "
        "name the format"
    )
    raise WorkloadError("file", f"{number} short prompts", allowed, file=file)


def rows(lines: Lines, file: str, form: TraceFormat) -> Iterator[tuple[int, Row]]:
    """Yield (line number, row) of each row. Raises WorkloadError, with file, line, column and
    value.
    """
    if form.is_csv:
        convert = partial(msgspec.convert, type=form.row, strict=False, dec_hook=Clock.parse)
        for number, cells in _cells(lines, file, form):
            yield number, checked(convert, cells, file, number)
    else:
        decode = msgspec.json.Decoder(form.row).decode
        for number, text in lines:
            yield number, checked(decode, text, file, number)


def _cells(lines: Lines, file: str, form: TraceFormat) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the rows below the header, each with its line number: cells by their column."""
    numbered = iter(lines)
    number, first = next(numbered)
    if not form.is_header(first):
        raise WorkloadError(
            "header", first, f"the columns {','.join(form.columns)}", file=file, line=number
        )
    names, before = header(first), number
    for number, line in numbered:
        with located(file, number):
            try:
                cells = next(csv.reader([line], strict=True))
            except csv.Error as error:
                raise WorkloadError("row", line, f"comma-separated cells ({error})") from None
            if len(cells) != len(names):
                raise WorkloadError(
                    "row", line, f"{len(names)} cells, as in the header ({','.join(names)})"
                )
        yield number, {name: cell.strip() for name, cell in zip(names, cells, strict=True)}
    if number == before:
        raise WorkloadError("file", first, "rows below the header", file=file, line=number)


def _request(index: int, arrival_s: float, row: Row) -> Request:
    return Request(index, arrival_s, row.input_length, row.output_length, hash_ids=row.hash_ids)


def spread(times_s: Sequence[float], bin_s: float, seed: int) -> list[float]:
    """Return times within their bins: each somewhere between its own value and `bin_s` later, but
    before the next value.

    Args:
        times_s: ascending; equal values are one bin.
        bin_s: width of a bin.
        seed: of the draws.
    """
    rng = np.random.default_rng([seed, 0])
    values = np.asarray(times_s, dtype=float)
    starts, first, counts = np.unique(values, return_index=True, return_counts=True)
    widths = np.minimum(np.append(np.diff(starts), bin_s), bin_s)
    out = values.copy()
    for start, begin, count, width in zip(starts, first, counts, widths, strict=True):
        out[begin : begin + count] = start + np.sort(rng.random(count)) * width
    return [float(value) for value in out]
