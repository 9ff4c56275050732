"""The record of each request while a workload is replayed. Times in seconds since the start of the
replay.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

from flying_lab.workload.model import Request

Status = Literal["ok", "failed", "unfinished"]
NOT_SENT = "not sent"


@dataclass(slots=True)
class Record:
    """One request, from its place in the workload to its last byte.

    `ok`: all tokens that were asked for have come. `failed`: the server refused it, broke off with
    an error, or the connection did. `unfinished`: it ended early, took longer than it may, or was
    cut off by the end of the replay.
    """

    request: Request
    status: Status = "unfinished"
    error: str | None = NOT_SENT
    sent_s: float | None = None
    first_byte_s: float | None = None
    end_s: float | None = None
    http_status: int | None = None
    finish_reason: str | None = None
    queue_s: float | None = None
    """Waiting time that the server reports."""
    usage_tokens: int | None = None
    token_s: array[float] = field(default_factory=lambda: array("d"))
    """The time of each event with tokens."""
    token_counts: array[int] = field(default_factory=lambda: array("i"))
    """The number of tokens of each event in `token_s`."""

    @property
    def output_tokens(self) -> int:
        """The number of tokens that came; the server's count where it gives one."""
        return sum(self.token_counts) if self.usage_tokens is None else self.usage_tokens
