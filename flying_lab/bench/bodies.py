"""The bodies of all requests, made before the replay begins, so that making them delays no
request.
"""

from __future__ import annotations

import mmap
import tempfile
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from flying_lab.workload.model import Request, Workload
from flying_lab.workload.prompts import Prompts


class Bodies:
    """JSON bodies in a temporary file, so that an hour of long prompts does not have to fit in
    memory.

    `extra` fields are added to each body, over ours; `made` is called with the number of bodies
    that are made.
    """

    def __init__(
        self,
        workload: Workload,
        model: str,
        prompts: Prompts,
        extra: Mapping[str, Any] | None = None,
        made: Callable[[int], None] | None = None,
    ) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._ends = array("q", [0])
        encoder = msgspec.json.Encoder()
        for request in workload.requests:
            fields = body_of(request, model, prompts.token_ids(request).tolist()) | dict(
                extra or {}
            )
            self._file.write(encoder.encode(fields))
            self._ends.append(self._file.tell())
            if made is not None:
                made(len(self._ends) - 1)
        self._file.flush()
        self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def __getitem__(self, position: int) -> bytes:
        """Return the body of the request at this position of the workload."""
        return self._map[self._ends[position] : self._ends[position + 1]]

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __enter__(self) -> Bodies:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()
        self._file.close()


def body_of(request: Request, model: str, token_ids: list[int]) -> dict[str, Any]:
    """Return the body of a request: a fixed number of output tokens, streamed, with their ids and a
    count at the end.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": token_ids,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if request.priority:
        body["priority"] = request.priority
    if request.tp_degree is not None:
        body["vllm_xargs"] = {"tp_degree": request.tp_degree}
    return body
