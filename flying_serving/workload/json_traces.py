"""Traces in JSONL: Mooncake's and vLLM's timed traces, which have the same columns.

They differ in units: Mooncake counts milliseconds and hashes blocks of 512 tokens (github.com/kvcache-ai/Mooncake); a
timed trace, as `vllm bench serve --dataset-name timed_trace` reads it, counts seconds and blocks of 16 tokens unless
told otherwise, and waits for the first timestamp as for any other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec

from flying_serving.errors import WorkloadError
from flying_serving.workload.json_rows import decode_row
from flying_serving.workload.lines import located
from flying_serving.workload.model import (
    MAX_HASH_ID,
    MAX_TOKENS,
    MOONCAKE_BLOCK_TOKENS,
    Request,
    blocks_of,
    check_blocks,
)
from flying_serving.workload.times import spread

MOONCAKE_BIN_S = 3.0
TIMED_BLOCK_TOKENS = 16

Tokens = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
HashId = Annotated[int, msgspec.Meta(ge=0, le=MAX_HASH_ID)]


class HashedRow(msgspec.Struct, frozen=True):
    """One line of such a trace; other columns, like `chat_id`, mean nothing to a replay."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: Annotated[tuple[HashId, ...], msgspec.Meta(min_length=1)]


@dataclass(frozen=True)
class Units:
    """How to read the rows."""

    seconds: float
    """What a timestamp is multiplied by."""
    block_tokens: int
    """Tokens that one hash id stands for."""
    bin_s: float = 0.0
    """How far times were rounded down."""
    from_first: bool = False
    """Time 0 is the first timestamp, not timestamp 0."""


MOONCAKE = Units(seconds=0.001, block_tokens=MOONCAKE_BLOCK_TOKENS, bin_s=MOONCAKE_BIN_S, from_first=True)
_ROW = msgspec.json.Decoder(HashedRow)


def read(lines: Iterable[tuple[int, str]], file: str, units: Units, seed: int) -> list[Request]:
    """Requests of a trace. Rounded times are spread inside their bins with the seed."""
    rows: list[HashedRow] = []
    for number, row in _rows(lines, file):
        with located(file, number):
            if rows and row.timestamp < rows[-1].timestamp:
                raise WorkloadError("timestamp", row.timestamp, f"not before the row before it ({rows[-1].timestamp})")
            if not math.isfinite(row.timestamp * units.seconds):
                raise WorkloadError("timestamp", row.timestamp, f"a finite number when multiplied by {units.seconds:g}")
            check_blocks(_request(0, 0.0, row), units.block_tokens)
        rows.append(row)
    start = rows[0].timestamp if units.from_first else 0.0
    times = [(row.timestamp - start) * units.seconds for row in rows]
    if units.bin_s:
        times = spread(times, units.bin_s, seed)
    return [_request(index, at, row) for index, (at, row) in enumerate(zip(times, rows, strict=True))]


def guess_units(lines: Iterable[tuple[int, str]], file: str) -> Units:
    """Whether rows are Mooncake's or a timed trace's, by how many tokens one hash id covers.

    Raises:
        WorkloadError: if the first row that tells them apart is neither, or none of these lines tells.
    """
    units = [MOONCAKE, Units(seconds=1.0, block_tokens=TIMED_BLOCK_TOKENS)]
    number = 0
    for number, row in _rows(lines, file):
        fitting = [unit for unit in units if len(row.hash_ids) == blocks_of(row.input_length, unit.block_tokens)]
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            sizes = " or ".join(str(blocks_of(row.input_length, unit.block_tokens)) for unit in units)
            allowed = f"{sizes} ids for {row.input_length} tokens (in blocks of 512 or 16); name format and block size"
            raise WorkloadError("hash_ids", f"{len(row.hash_ids)} ids", allowed, file=file, line=number)
    allowed = "prompts of more than 16 tokens; these may be Mooncake's or a timed trace's: name the format"
    raise WorkloadError("file", f"{number} short prompts", allowed, file=file)


def _rows(lines: Iterable[tuple[int, str]], file: str) -> Iterator[tuple[int, HashedRow]]:
    for number, text in lines:
        row = decode_row(_ROW, text, file, number)
        if not math.isfinite(row.timestamp):
            raise WorkloadError("timestamp", row.timestamp, "a finite number", file=file, line=number)
        yield number, row


def _request(index: int, arrival_s: float, row: HashedRow) -> Request:
    return Request(index, arrival_s, row.input_length, row.output_length, hash_ids=row.hash_ids)
