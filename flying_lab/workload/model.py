"""The parts of a workload: requests in the order of their arrival, lengths and times only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from flying_lab.errors import WorkloadError

Format = Literal["azure", "burstgpt", "mooncake", "timed_trace", "flying"]
"""Formats of files with workloads."""
MAX_TOKENS = 2**24
MAX_HASH_ID = 2**63 - 1
MAX_PRIORITY = 2**31 - 1
MOONCAKE_BLOCK_TOKENS = 512


class Request(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One request of a workload.

    `arrival_s` counts from the start of the workload. Lower `priority` is more urgent, as in vLLM.

    `hash_ids` name the blocks of the prompt: requests whose ids begin alike share that part of
    their prompts. Empty means that the prompt is like no other.

    `tp_degree` asks for a degree (devices). `deadline_s` counts from the arrival to the last token.

    Requests of one `event` come together, as the `n` outputs of a prompt and the prompts of a batch
    do; None: it comes alone.

    `phase` is the generator's phase ("low", "burst"), None if there are no phases. `index` stays
    with the request when a workload is cut: prompts are made from it.

    Raises:
        WorkloadError: naming the field that is out of range.
    """

    index: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    phase: str | None = None
    hash_ids: tuple[int, ...] = ()
    tp_degree: int | None = None
    deadline_s: float | None = None
    event: int | None = None

    def __post_init__(self) -> None:
        if self.index < 0:
            raise WorkloadError("index", self.index, "at least 0")
        if not 0 <= self.arrival_s < math.inf:
            raise WorkloadError(
                "arrival_s", self.arrival_s, "a finite number of seconds, at least 0"
            )
        if not 1 <= self.prompt_tokens <= MAX_TOKENS:
            raise WorkloadError("prompt_tokens", self.prompt_tokens, f"1 to {MAX_TOKENS} tokens")
        if not 1 <= self.output_tokens <= MAX_TOKENS:
            raise WorkloadError("output_tokens", self.output_tokens, f"1 to {MAX_TOKENS} tokens")
        if abs(self.priority) > MAX_PRIORITY:
            raise WorkloadError("priority", self.priority, f"{-MAX_PRIORITY} to {MAX_PRIORITY}")
        if self.hash_ids and not 0 <= min(self.hash_ids) <= max(self.hash_ids) <= MAX_HASH_ID:
            raise WorkloadError("hash_ids", self.hash_ids, f"numbers from 0 to {MAX_HASH_ID}")
        if self.tp_degree is not None and self.tp_degree < 1:
            raise WorkloadError("tp_degree", self.tp_degree, "at least 1 device")
        if self.deadline_s is not None and not 0 < self.deadline_s < math.inf:
            raise WorkloadError("deadline_s", self.deadline_s, "a finite number of seconds above 0")


class Workload(msgspec.Struct, frozen=True):
    """Requests sorted by arrival, indices ascending, at least one.

    `seed` makes the prompts; `block_tokens` is the number of tokens of one hash id; `origin` says
    how the workload was made.

    Raises:
        WorkloadError: naming the request that is out of order, or whose `hash_ids` do not fit its
            prompt.
    """

    name: str
    seed: int
    requests: tuple[Request, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    origin: str = ""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise WorkloadError("seed", self.seed, "at least 0")
        if not 1 <= self.block_tokens <= MAX_TOKENS:
            raise WorkloadError("block_tokens", self.block_tokens, f"1 to {MAX_TOKENS} tokens")
        if not self.requests:
            raise WorkloadError("requests", 0, "a workload has at least one request")
        before: Request | None = None
        for request in self.requests:
            check_order(before, request)
            check_blocks(request, self.block_tokens)
            before = request

    @property
    def duration_s(self) -> float:
        """Return the seconds from the start to the last arrival."""
        return self.requests[-1].arrival_s

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt tokens of all requests."""
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Return the output tokens of all requests."""
        return sum(request.output_tokens for request in self.requests)

    def having(self, requests: Iterable[Request], *, block_tokens: int | None = None) -> Workload:
        """Return the same workload with other requests."""
        blocks = self.block_tokens if block_tokens is None else block_tokens
        return msgspec.structs.replace(self, requests=tuple(requests), block_tokens=blocks)


def blocks_of(prompt_tokens: int, block_tokens: int) -> int:
    """Return how many blocks a prompt fills, the last of them perhaps in part."""
    return -(-prompt_tokens // block_tokens)


def check_order(before: Request | None, request: Request) -> None:
    """Raise WorkloadError, naming `arrival_s` or `index`, for a request that does not come after
    the one before it.
    """
    if before is None:
        return
    if request.arrival_s < before.arrival_s:
        allowed = f"not before the request before it ({before.arrival_s})"
        raise WorkloadError("arrival_s", request.arrival_s, allowed)
    if request.index <= before.index:
        raise WorkloadError(
            "index", request.index, f"above that of the request before it ({before.index})"
        )


def check_blocks(request: Request, block_tokens: int) -> None:
    """Raise WorkloadError, naming `hash_ids`, for hash ids that are not one for each block of the
    prompt.
    """
    if not request.hash_ids:
        return
    expected = blocks_of(request.prompt_tokens, block_tokens)
    if len(request.hash_ids) != expected:
        prompt = f"{request.prompt_tokens} tokens in blocks of {block_tokens}"
        raise WorkloadError(
            "hash_ids", f"{len(request.hash_ids)} ids", f"{expected} ids for {prompt}"
        )
