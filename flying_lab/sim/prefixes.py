"""The prefix cache of one group: blocks of prompts that its KV memory has from requests that it has
served.

As in vLLM, a block stays after its requests until its memory is needed, and the least recently used
one goes first. The last token of a prompt is always computed.

Coarser than vLLM: a hash id is there as a whole or not at all, and outputs are not kept. A request
takes memory of its own also for blocks that it shares. The free memory bounds each cache of a group
and of its members, as if the others had none of it.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixCache:
    """The hash ids whose KV a group has.

    Args:
        id_tokens: tokens of one hash id.
        block_tokens: tokens in one KV block of the group.
    """

    def __init__(self, id_tokens: int, block_tokens: int) -> None:
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._id_tokens = id_tokens
        self._block_tokens = block_tokens
        self._running: dict[int, int] = {}
        """The number of running requests that have an id."""
        self._idle: dict[int, None] = {}
        """Ids of no running request, the least recently used first."""

    def __len__(self) -> int:
        return len(self._running) + len(self._idle)

    def find(self, hash_ids: Sequence[int], prompt_tokens: int) -> int:
        """Return the tokens at the beginning of a prompt that need not be computed. Counts as a use
        of them.
        """
        count = 0
        for hash_id in hash_ids:
            if hash_id not in self._running and hash_id not in self._idle:
                break
            count += 1
        for hash_id in reversed(hash_ids[:count]):
            if hash_id in self._idle:
                del self._idle[hash_id]
                self._idle[hash_id] = None
        found_tokens = min(count * self._id_tokens, prompt_tokens - 1)
        self.queried_tokens += prompt_tokens
        self.hit_tokens += found_tokens
        return found_tokens

    def hold(self, hash_ids: Sequence[int]) -> None:
        """Hold the ids of a request that has computed its prompt and runs."""
        for hash_id in hash_ids:
            self._idle.pop(hash_id, None)
            self._running[hash_id] = self._running.get(hash_id, 0) + 1

    def release(self, hash_ids: Sequence[int]) -> None:
        """Release the ids of a request that has left. The end of its prompt is to go before the
        beginning, which more requests share.
        """
        for hash_id in reversed(hash_ids):
            self._running[hash_id] -= 1
            if not self._running[hash_id]:
                del self._running[hash_id]
                self._idle[hash_id] = None

    def keep_within(self, free_blocks: int) -> None:
        """Forget idle ids that do not fit into the free blocks."""
        most = free_blocks * self._block_tokens // self._id_tokens
        while len(self._idle) > most:
            del self._idle[next(iter(self._idle))]
