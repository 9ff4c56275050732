"""The work of the simulator's lanes: requests, KV blocks, and the contents of a step."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flying_lab.sim.prefixes import PrefixCache
from flying_serving.layout.groups import Group
from flying_serving.parallelism import Parallelism

UNLIMITED = sys.maxsize
"""A group's limit of tokens for a request that it may run to its end."""


@dataclass(slots=True, eq=False)
class SimRequest:
    """One request. Times in seconds, NaN until then.

    Args:
        output_tokens: all that it is to have; `limit_tokens`: how many of them it may have when
            its group is done with it.
        begun_s: when the first step with a part of its prompt began.
        tokens: output tokens that it has. While it decodes, `DecodeBatch.sync` brings them up to
            date.
        reported_tokens: how many of these tokens the controller knows.
        computed_tokens: tokens whose KV is in `group` or, since `left_s`, in the group that it has
            left.
        target_tokens: tokens to compute before the next one is sampled.
        joined_at, ends_at: counts of its `DecodeBatch`.
        token_s: time of each output token, if these are kept.
        hash_ids: of the blocks of its prompt.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    arrival_s: float
    limit_tokens: int = UNLIMITED
    begun_s: float = math.nan
    first_token_s: float = math.nan
    end_s: float = math.nan
    tokens: int = 0
    reported_tokens: int = 0
    preemptions: int = 0
    computed_tokens: int = 0
    target_tokens: int = 0
    blocks: int = 0
    ends_at: int = 0
    joined_at: int = 0
    left_s: float = 0.0
    group: Group | None = None
    token_s: array[float] | None = None
    hash_ids: tuple[int, ...] = ()

    @property
    def context_tokens(self) -> int:
        """Return the tokens of prompt and output until now."""
        return self.prompt_tokens + self.tokens

    @property
    def ended(self) -> bool:
        """Return whether the request has all its tokens."""
        return self.tokens == self.output_tokens

    @property
    def tokens_here(self) -> int:
        """Output tokens that it has when its group is done with it."""
        return min(self.output_tokens, self.limit_tokens)

    def leave(self, now_s: float) -> None:
        """Its group is done with it: it has ended, or another group may pull its KV."""
        self.computed_tokens = self.context_tokens - 1
        self.left_s = now_s
        if self.ended:
            self.end_s = now_s


@dataclass(slots=True)
class BlockPool:
    """An engine's KV blocks. Lanes of all sizes take theirs from it; their prefix caches have the
    free ones.
    """

    blocks: int
    free: int
    caches: list[PrefixCache] = field(default_factory=list)


class GroupBlocks:
    """The KV blocks of a group: each is one block of every member."""

    def __init__(self, pools: Sequence[BlockPool], block_tokens: int) -> None:
        self._pools = pools
        self._block_tokens = block_tokens

    def holding(self, tokens: int) -> int:
        """Return the number of blocks that hold a number of tokens."""
        return -(-tokens // self._block_tokens)

    @property
    def free(self) -> int:
        """Return the blocks that every member has free."""
        if len(self._pools) == 1:
            return self._pools[0].free
        return min(pool.free for pool in self._pools)

    def take(self, blocks: int) -> None:
        """Take free blocks, which a decoding request or several share out; negative to return
        them.
        """
        for pool in self._pools:
            pool.free -= blocks
            for cache in pool.caches:
                cache.keep_within(pool.free)

    def cache(self, id_tokens: int) -> PrefixCache:
        """Begin to keep prompts in free blocks; `id_tokens` is the number of tokens of one hash
        id.
        """
        cache = PrefixCache(id_tokens, self._block_tokens)
        for pool in self._pools:
            pool.caches.append(cache)
        return cache

    def give_back(self, request: SimRequest) -> None:
        """Free the blocks of a request."""
        self.take(-request.blocks)
        request.blocks = 0


class Chunk(NamedTuple):
    """A part of a prompt that one step computes."""

    new_tokens: int
    tokens_before: int


@dataclass(slots=True)
class SimStep:
    """The contents of one step: chunks of prompts, and decoding requests that compute one token
    each.

    Args:
        chunks: of prompts.
        sequences: decoding requests.
        decode_context_tokens: tokens that the decoding requests have computed before.
        prompts: the requests of `chunks`.
        parallelism: what the engines of its group divide.
    """

    chunks: list[Chunk]
    sequences: int = 0
    decode_context_tokens: int = 0
    prompts: list[SimRequest] = field(default_factory=list)
    parallelism: Parallelism = Parallelism.TENSOR

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Return its tokens of prompts, its decoding requests, its context and its pairs, as in a
        `StepRow`.
        """
        return self.prefill_tokens, self.sequences, self.context_tokens, self.prefill_pairs

    @property
    def prefill_tokens(self) -> int:
        """Return the prompt tokens that it computes."""
        return sum(chunk.new_tokens for chunk in self.chunks)

    @property
    def context_tokens(self) -> int:
        """Return the tokens that its requests have computed before, decoding ones and prompts."""
        return self.decode_context_tokens + sum(chunk.tokens_before for chunk in self.chunks)

    @property
    def prefill_pairs(self) -> int:
        """Return the prompt tokens times the tokens of their requests before them."""
        return sum(chunk.new_tokens * chunk.tokens_before for chunk in self.chunks)
