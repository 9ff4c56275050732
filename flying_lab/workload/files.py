"""Workloads in files: our own JSONL (a header, then one request per line), and one that vLLM's own
bench replays.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from flying_lab.errors import WorkloadError
from flying_lab.workload.model import (
    MAX_TOKENS,
    Request,
    Workload,
    blocks_of,
    check_blocks,
    check_order,
)
from flying_lab.workload.rows import checked, located
from flying_lab.workload.traces import HashedRow

FORMAT: Final = "flying-serving-workload"


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a workload file."""

    format: Literal["flying-serving-workload"]
    version: Literal[1]
    name: str
    seed: Annotated[int, msgspec.Meta(ge=0)]
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
    requests: Annotated[int, msgspec.Meta(ge=1)]
    """The number of lines that follow: a file that was cut off is noticed."""
    origin: str


_HEADER = msgspec.json.Decoder(Header)
_REQUEST = msgspec.json.Decoder(Request)


def save(workload: Workload, path: Path) -> None:
    """Write a workload; `load` gives exactly the same one."""
    encoder = msgspec.json.Encoder()
    requests = workload.requests
    header = Header(
        FORMAT,
        1,
        workload.name,
        workload.seed,
        workload.block_tokens,
        len(requests),
        workload.origin,
    )
    with path.open("wb") as stream:
        for line in itertools.chain([header], requests):
            stream.write(encoder.encode(line) + b"\n")


def load(lines: Iterable[tuple[int, str]], file: str, limit: int | None = None) -> Workload:
    """Return the workload in the lines of a file, at most `limit` requests of it.

    Raises:
        WorkloadError: with file, line, column and value.
    """
    numbered = iter(lines)
    number, first = next(numbered)
    header = checked(_HEADER.decode, first, file, number)
    requests: list[Request] = []
    for number, text in itertools.islice(numbered, limit):
        request = checked(_REQUEST.decode, text, file, number)
        with located(file, number):
            check_order(requests[-1] if requests else None, request)
            check_blocks(request, header.block_tokens)
        requests.append(request)
    expected = header.requests if limit is None else min(limit, header.requests)
    if len(requests) != expected:
        allowed = f"{header.requests} requests, as the header says"
        raise WorkloadError("requests", len(requests), allowed, file=file, line=number)
    return Workload(header.name, header.seed, tuple(requests), header.block_tokens, header.origin)


def save_timed_trace(workload: Workload, path: Path) -> None:
    """Write a file for `vllm bench serve --dataset-name timed_trace --timed-trace-chunk-hash-size
    BLOCK_TOKENS`.

    Prompts without hash ids get ids of their own: that tool makes prompts from ids only.
    """
    encoder = msgspec.json.Encoder()
    used = {id for request in workload.requests for id in request.hash_ids}
    fresh = (id for id in itertools.count() if id not in used)
    with path.open("wb") as stream:
        for request in workload.requests:
            blocks = blocks_of(request.prompt_tokens, workload.block_tokens)
            ids = request.hash_ids or tuple(itertools.islice(fresh, blocks))
            row = HashedRow(request.arrival_s, request.prompt_tokens, request.output_tokens, ids)
            stream.write(encoder.encode(row) + b"\n")
