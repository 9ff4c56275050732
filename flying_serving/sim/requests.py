"""What lanes of the simulator work on: requests, KV blocks, and what a step does."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol


class Place(Protocol):
    """The lane that a request is in, as others than the lane see it."""

    def remove(self, request: SimRequest) -> None:
        """Take the request out; its blocks are free."""

    def sync(self, request: SimRequest) -> None:
        """Bring the request's counts up to date."""


@dataclass(slots=True, eq=False)
class SimRequest:
    """One request in the simulator. Times in seconds; `tokens` are output tokens that it has.

    `reported_tokens` are those that the controller knows of. `computed_tokens` are those whose KV is somewhere, in its
    group or, since `left_s`, in the one that it has left. `token_s` has the time of each token, if they are kept.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    first_token_s: float = -1.0
    end_s: float = -1.0
    tokens: int = 0
    reported_tokens: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    target_tokens: int = 0
    blocks: int = 0
    ends_at: int = 0
    joined_at: int = 0
    left_s: float = 0.0
    lane: Place | None = None
    token_s: array[float] | None = None

    @property
    def context_tokens(self) -> int:
        """Prompt and output so far."""
        return self.prompt_tokens + self.tokens


class BlockPool:
    """An engine's KV blocks; lanes of all sizes take theirs from it."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.free = blocks


@dataclass(slots=True)
class SimStep:
    """What a step does: `prefill` has (request, new tokens), `chunks` (new tokens, tokens before) of the same."""

    prefill: list[tuple[SimRequest, int]]
    chunks: list[tuple[int, int]]
    prefill_tokens: int
    sequences: int
    decode_context_tokens: int

    @property
    def context_tokens(self) -> int:
        """Tokens that its requests had computed before, decoding ones and prompts."""
        return self.decode_context_tokens + sum(before for _, before in self.chunks)

    @property
    def prefill_pairs(self) -> int:
        """Prompt tokens times the tokens of their requests before them."""
        return sum(new * before for new, before in self.chunks)
