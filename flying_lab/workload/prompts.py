"""Prompts for requests that have lengths only: token ids from index, hash ids and a seed."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from flying_lab.errors import WorkloadError
from flying_lab.workload.model import Request, Workload

_NAME_BITS = 65
"""A block's name is a hash id or an index (64 bits), and one bit that says which."""
_CACHED_BLOCKS = 4096


class Prompts:
    """Makes the prompts of a workload.

    Two requests whose `hash_ids` begin alike have exactly the tokens of these blocks in common.
    Each block begins with its own name in base `len(vocabulary)`, lowest digit first. So beyond
    that, and for requests without `hash_ids`, prompts part within a few tokens (nine with 256 token
    ids, five with 32,000).

    Token ids are drawn from `vocabulary`; leave out special tokens. Another seed than the
    workload's gives other prompts, which a server's prefix cache does not know.
    """

    def __init__(self, workload: Workload, vocabulary: range, seed: int | None = None) -> None:
        if len(vocabulary) < 2 or vocabulary.step != 1 or vocabulary.start < 0:
            raise WorkloadError("vocabulary", vocabulary, "a range of at least 2 token ids")
        self._seed = workload.seed if seed is None else seed
        if self._seed < 0:
            raise WorkloadError("seed", seed, "at least 0")
        self._vocabulary = vocabulary
        self._block_tokens = workload.block_tokens
        self._name_digits = next(
            n for n in range(1, _NAME_BITS + 1) if len(vocabulary) ** n >= 2**_NAME_BITS
        )
        self._shared = lru_cache(_CACHED_BLOCKS)(
            lambda id: self._block(2 * id + 1, self._block_tokens)
        )

    def token_ids(self, request: Request) -> NDArray[np.int64]:
        """Return the prompt of a request: `request.prompt_tokens` token ids."""
        if not request.hash_ids:
            return self._block(2 * request.index, request.prompt_tokens)
        whole = np.concatenate([self._shared(id) for id in request.hash_ids])
        return whole[: request.prompt_tokens]

    def _block(self, name: int, tokens: int) -> NDArray[np.int64]:
        """Return the tokens of one block: its name, then draws that only this seed and name
        give.
        """
        size = len(self._vocabulary)
        block = np.random.default_rng([self._seed, name]).integers(size, size=tokens)
        for place in range(min(tokens, self._name_digits)):
            name, block[place] = divmod(name, size)
        return block + self._vocabulary.start
