"""Reading of a workload from a file of any known format, which its content tells."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from flying_lab.errors import WorkloadError
from flying_lab.workload import files, traces
from flying_lab.workload.model import Format, Workload
from flying_lab.workload.rows import checked, numbered_lines
from flying_lab.workload.traces import FORMATS

HEAD_LINES = 1000
_OBJECT = msgspec.json.Decoder(dict[str, Any])


def read_workload(
    path: Path,
    seed: int = 0,
    *,
    format: Format | None = None,
    limit: int | None = None,
    sec_multiplier: float = 1.0,
    block_tokens: int = FORMATS["timed_trace"].block_tokens,
) -> Workload:
    """Return the workload in a file, which is read once as a stream, and not beyond `limit`
    requests, at least 1.

    `seed`: of the prompts, and of the draws that spread rounded times; a workload in our own format
    keeps its own. `format`: None to detect it from the content. `sec_multiplier`: seconds per unit
    of a timestamp, and `block_tokens`: tokens per hash id, in a timed trace.

    Raises:
        WorkloadError: with file, line, column, value and the allowed values, for anything that
            cannot be read.
    """
    file = str(path)
    stream = numbered_lines(path)
    head = list(itertools.islice(stream, HEAD_LINES))
    found = format or detect(head, file)
    lines = itertools.chain(head, stream)
    if found == "flying":
        return files.load(lines, file, limit)
    form = FORMATS[found]
    if found == "timed_trace":
        form = replace(form, seconds=sec_multiplier, block_tokens=block_tokens)
    limited = itertools.islice(lines, None if limit is None else limit + form.is_csv)
    requests = tuple(traces.read(limited, file, form, seed))
    return Workload(path.stem, seed, requests, form.block_tokens, f"{found} trace {path.name}")


def detect(head: Sequence[tuple[int, str]], file: str) -> str:
    """Return the format of a file by its first line, or its first lines where that does not tell.

    Raises:
        WorkloadError: if it is no known format.
    """
    number, first = head[0]
    if not first.startswith("{"):
        tables = {name: form for name, form in FORMATS.items() if form.is_csv}
        for name, form in tables.items():
            if form.is_header(first):
                return name
        headers = " or ".join(",".join(form.columns) for form in tables.values())
        raise WorkloadError(
            "header", first, f"JSONL, or the header {headers}", file=file, line=number
        )
    row = checked(_OBJECT.decode, first, file, number)
    if "format" in row:
        return "flying"
    columns = FORMATS["mooncake"].columns
    missing = [name for name in columns if name not in row]
    if missing:
        allowed = (
            f"columns {', '.join(columns)} (missing: {', '.join(missing)}), or the "
            "header of a workload file"
        )
        raise WorkloadError("row", first, allowed, file=file, line=number)
    return traces.guess_units(head, file)
