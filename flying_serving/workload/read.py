"""Read a workload from a file of any known format; which one is told by its content."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from flying_serving.errors import WorkloadError
from flying_serving.workload import csv_traces, files, json_traces
from flying_serving.workload.json_rows import decode_row
from flying_serving.workload.lines import numbered_lines
from flying_serving.workload.model import Format, Workload

HEAD_LINES = 1000
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_COLUMNS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_workload(
    path: Path,
    seed: int = 0,
    *,
    format: Format | None = None,
    limit: int | None = None,
    sec_multiplier: float = 1.0,
    block_tokens: int = json_traces.TIMED_BLOCK_TOKENS,
) -> Workload:
    """The workload in a file.

    Args:
        path: of the file, read once as a stream.
        seed: of the prompts, and of the draws that spread rounded times; a workload in our own format keeps its own.
        format: the format, None to detect it from the content.
        limit: requests to read, at least 1; nothing behind them is read.
        sec_multiplier: seconds per unit of a timestamp, in a timed trace.
        block_tokens: tokens per hash id, in a timed trace.

    Raises:
        WorkloadError: with file, line, column, value and what is allowed, for anything that cannot be read.
    """
    file = str(path)
    stream = numbered_lines(path)
    head = list(itertools.islice(stream, HEAD_LINES))
    found = format or detect(head, file)
    lines = itertools.chain(head, stream)
    if found == "flying":
        return files.load(lines, file, limit)
    with_header = itertools.islice(lines, None if limit is None else limit + 1)
    units = json_traces.MOONCAKE
    if found == "azure":
        requests = csv_traces.azure(with_header, file)
    elif found == "burstgpt":
        requests = csv_traces.burstgpt(with_header, file, seed)
    else:
        if found == "timed_trace":
            units = json_traces.Units(sec_multiplier, block_tokens)
        requests = json_traces.read(itertools.islice(lines, limit), file, units, seed)
    return Workload(path.stem, seed, tuple(requests), units.block_tokens, f"{found} trace {path.name}")


def detect(head: Sequence[tuple[int, str]], file: str) -> Format:
    """The format of a file by its first line, or its first lines where that does not tell.

    Raises:
        WorkloadError: if it is none that is known.
    """
    number, first = head[0]
    if not first.startswith("{"):
        names = csv_traces.header(first)
        if csv_traces.is_azure(names):
            return "azure"
        if csv_traces.is_burstgpt(names):
            return "burstgpt"
        allowed = f"JSONL, or the header {','.join(csv_traces.AZURE)} or {','.join(csv_traces.BURSTGPT)}"
        raise WorkloadError("header", first, allowed, file=file, line=number)
    row = decode_row(_OBJECT, first, file, number)
    if "format" in row:
        return "flying"
    missing = [name for name in _COLUMNS if name not in row]
    if missing:
        allowed = f"columns {', '.join(_COLUMNS)} (missing: {', '.join(missing)}), or the header of a workload file"
        raise WorkloadError("row", first, allowed, file=file, line=number)
    return "mooncake" if json_traces.guess_units(head, file) is json_traces.MOONCAKE else "timed_trace"
