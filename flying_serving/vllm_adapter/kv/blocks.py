"""vLLM's block pool behind the protocol that lending needs."""

from collections.abc import Iterable
from itertools import chain, islice
from typing import Any

from flying_serving.errors import IntegrityError
from flying_serving.memory.kv_groups import KVGroups, one_group


def may_start(scheduler: Any) -> int:
    """Return how many waiting requests may run beside the running ones."""
    return max(0, int(scheduler.max_num_running_reqs) - len(scheduler.running))


def _tokens_with_outstanding(request: Any) -> int:
    """Return the tokens of a request, its drafts, and the tokens that outstanding steps sample."""
    return int(request.num_tokens_with_spec + request.num_output_placeholders)


class SchedulerPool:
    """`flying_serving.memory.lent_blocks.Pool` over the BlockPool of a `LaneScheduler`.

    `groups`: the lane's KV groups, which share the pool; None: one, of attention.
    """

    def __init__(self, scheduler: Any, groups: KVGroups | None = None) -> None:
        self.scheduler = scheduler
        self.groups = one_group(scheduler.block_size) if groups is None else groups
        self._pool = scheduler.kv_cache_manager.block_pool
        self.step_tokens = 1 + scheduler.num_spec_tokens
        """Most tokens of a step of a request that decodes."""
        self.withheld: set[int] = set()
        """Blocks that are withheld from all requests."""
        self.forgotten = 0
        """How often the prefix cache was emptied for fear of wrong KV (`forget_prefixes`)."""
        self._pinned: list[list[int]] = []
        self._ahead: set[str] = set()

    @property
    def total(self) -> int:
        """All blocks except the null block and withheld blocks."""
        return int(self._pool.num_gpu_blocks) - 1 - len(self.withheld)

    def free_count(self) -> int:
        """Return the number of blocks without a user, cached ones included."""
        return int(self._pool.get_num_free_blocks())

    def take(self, count: int) -> list[int]:
        """Allocate blocks as vLLM does: least recently used first, evicting their cached
        contents.
        """
        return [block.block_id for block in self._pool.get_new_blocks(count)]

    def give(self, blocks: list[int]) -> None:
        """Release blocks as vLLM does."""
        self._pool.free_blocks([self._pool.blocks[b] for b in blocks])

    def valid_tokens(self, request: Any) -> int:
        """Return how many of a request's first tokens have KV that can migrate; its last token
        never has.

        With state all of these tokens migrate, or none: the state is that after the last of them.
        No token migrates during a step, which changes the state.

        Tokens of a step under way do not count. Tokens from the prefix cache do not count either
        while the request's own first step is under way. The reason is that vLLM caches them as soon
        as the step that computes them is scheduled.
        """
        if not self.groups.may_offer(runs=bool(request.num_in_flight_tokens)):
            return 0
        valid = request.num_computed_tokens - request.num_in_flight_tokens
        cached = self.scheduler.cached_tokens.get(request.request_id, 0)
        if request.num_in_flight_tokens and valid <= cached:
            return 0
        return int(max(0, min(valid, request.num_tokens - 1)))

    def blocks_of(self, request_id: str) -> list[int]:
        """Return a request's blocks, in its order."""
        return self.groups.in_a_list(self.scheduler.kv_cache_manager.get_block_ids(request_id))

    def pin(self, request_id: str) -> list[int]:
        """Pin a request's blocks until `unpin`, even if the request ends. Returns them in its
        order.
        """
        blocks = self.blocks_of(request_id)
        self._pool.touch([self._pool.blocks[b] for b in blocks])
        self._pinned.append(blocks)
        return blocks

    def unpin(self, blocks: list[int], count: int | None = None) -> list[int]:
        """Free pinned blocks: the first `count`, or all. Returns the blocks that stay pinned."""
        self._pinned.remove(blocks)
        kept = [] if count is None else blocks[count:]
        if kept:
            self._pinned.append(kept)
        self.give(blocks[:count][::-1])  # as vLLM frees them: the end of a request is evicted first
        return kept

    def prepare(
        self, request: Any, tokens: int, *, next_token: bool = True
    ) -> tuple[int, list[int]] | None:
        """Set blocks aside for the KV of a request's first `tokens` tokens, before the scheduler
        has it.

        This works as in vLLM for KV that a connector brings (`Scheduler.schedule`,
        WAITING_FOR_REMOTE_KVS). Returns how many of its tokens the prefix cache has, and the blocks
        of all tokens. With `next_token` there is room for its next step. None if there are too few
        blocks.
        """
        if tokens == 0:  # vLLM allocates nothing for nothing
            return 0, []
        cached, start, _ = self.scheduler.kv_cache_manager.get_computed_blocks(request)
        self.scheduler.cached_tokens[request.request_id] = start
        new = {
            "num_new_computed_tokens": start,
            "new_computed_blocks": cached,
            "num_external_computed_tokens": max(0, tokens - start),
        }
        if not self._allocate(request, 0, next_token, **new):
            return None
        self._ahead.add(request.request_id)
        return start, self.blocks_of(request.request_id)

    def extend(self, request: Any, tokens: int, *, next_token: bool) -> list[int] | None:
        """Set more blocks aside for a request that has some. Returns all of them; None if there are
        too few.
        """
        has_room = self._allocate(request, tokens, next_token)
        return self.blocks_of(request.request_id) if has_room else None

    def _allocate(self, request: Any, new_tokens: int, next_token: bool, **computed: Any) -> bool:
        # without `next_token`, requests that wait for its block could hold all blocks for ever
        manager = self.scheduler.kv_cache_manager
        made = manager.allocate_slots(
            request,
            new_tokens,
            **computed,
            num_lookahead_tokens=self.step_tokens if next_token else 0,
            delay_cache_blocks=True,
            has_scheduled_reqs=False,
        )
        manager.take_new_block_ids()  # the next step would zero them, with the KV that comes first
        return made is not None

    def missing_for(self, tokens: int, owned: int = 0) -> int:
        """Return the blocks that are missing for `tokens` tokens and the next step. `owned`: blocks
        set aside already.
        """
        most = min(tokens + self.step_tokens, self.scheduler.max_model_len)
        return max(0, self.groups.blocks_for(most) - owned - self.free_count())

    def is_short(self) -> bool:
        """Return whether running requests, or waiting ones if none run, lack blocks."""
        if self.scheduler.running:
            return (
                self.free_count() < len(self.scheduler.running) and self.missing_for_running() > 0
            )
        return bool(self.scheduler.waiting) and self.missing_for_next() > 0

    def hit_tokens(self, request_id: str) -> int:
        """Return how many of a request's first tokens were not computed for it: a prefix cache had
        them, where it began.
        """
        return int(self.scheduler.hit_tokens.get(request_id, 0))

    def note_hits(self, request: Any, tokens: int) -> None:
        """Note the same of a request that comes with its KV from another group."""
        self.scheduler.hit_tokens[request.request_id] = tokens

    def arrived(self, request: Any, tokens: int) -> None:
        """Hand a request to the scheduler: the KV of its first `tokens` tokens is in its blocks.

        vLLM counts the tokens of a prompt when it begins with nothing computed. The counts of one
        that was begun elsewhere are set here, unless they were reported there. KV that was moved
        counts as computed: the client has not been spared it.
        """
        self._ahead.discard(request.request_id)
        request.num_computed_tokens = tokens
        if request.prefill_stats is not None:
            hit_tokens = min(tokens, self.hit_tokens(request.request_id))
            request.prefill_stats.set(request.num_prompt_tokens, hit_tokens, 0)
        self.scheduler.arrived_tokens[request.request_id] = tokens
        self.scheduler.kv_cache_manager.cache_blocks(request, tokens)

    def release(self, request: Any) -> None:
        """Free the blocks that were set aside for a request: no KV arrives for it."""
        self._ahead.discard(request.request_id)
        self.scheduler.cached_tokens.pop(request.request_id, None)
        self.scheduler.hit_tokens.pop(request.request_id, None)
        self.scheduler.kv_cache_manager.free(request)

    def requests_own(self) -> set[int]:
        """Return the blocks that requests hold, also arriving and leaving ones, without the null
        block.
        """
        manager = self.scheduler.kv_cache_manager
        owned = {block for blocks in self._pinned for block in blocks}
        for request_id in (*self.scheduler.requests, *self._ahead):
            for blocks in manager.get_block_ids(request_id):
                owned.update(blocks)
        return owned - {self._pool.null_block.block_id}

    def check(self, outside: set[int]) -> None:
        """Raise IntegrityError unless every block is exactly one of free, owned by a request, or in
        `outside`.
        """
        owned, outside = self.requests_own(), outside | self.withheld
        free = {b.block_id for b in self._pool.blocks if b.ref_cnt == 0 and not b.is_null}
        every = {b.block_id for b in self._pool.blocks if not b.is_null}
        if owned & outside or owned & free or free & outside:
            raise IntegrityError(
                f"blocks with two owners: {sorted(owned & outside | owned & free | free & outside)}"
            )
        if owned | free | outside != every:
            raise IntegrityError(f"blocks without owner: {sorted(every - owned - free - outside)}")
        if len(free) != self.free_count():
            raise IntegrityError(
                f"{len(free)} blocks without reference, {self.free_count()} in the free list"
            )

    def reset_prefix_cache(self, outside: int, **options: Any) -> bool:
        """Reset the prefix cache as vLLM does, which fails while blocks are in use; `outside`
        blocks are used by others.
        """
        outside += len(self.withheld)
        self._pool.num_gpu_blocks -= outside
        try:
            return bool(self.scheduler.reset_prefix_cache(**options))
        finally:
            self._pool.num_gpu_blocks += outside

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, also of blocks that are in use. Requests that arrive with KV of a
        prefix from before must not use it.
        """
        self.forgotten += 1
        self._pool.evict_blocks(set(range(self._pool.num_gpu_blocks)))

    def reserved(self) -> int:
        """Return the blocks that the scheduler's unfinished requests may still need until they
        end.
        """
        longest, drafts = self.scheduler.max_model_len, self.step_tokens - 1
        requests = self.scheduler.requests.values()
        return sum(
            self._lacks(r, min(r.num_prompt_tokens + r.max_tokens + drafts, longest))
            for r in requests
        )

    def needed_by_running(self) -> int:
        """Return the blocks that begun requests need beside their own for their present tokens and
        the next one.
        """
        begun = (*self.scheduler.running, *self.scheduler.kv_holding_waiting)
        return sum(self._lacks(request, _tokens_with_outstanding(request) + 1) for request in begun)

    def missing_for_next(self, most: int | None = None) -> int:
        """Return the blocks that are missing to begin the first `most` waiting requests, or all;
        one token more than a step needs.
        """
        waiting = chain(self.scheduler.kv_holding_waiting, self.scheduler.waiting)
        return self._missing(chain(self.scheduler.running, islice(waiting, most)), 1)

    def missing_for_running(self, ahead: int = 0) -> int:
        """Return the blocks without which the next step would preempt a request, were each `ahead`
        tokens longer.
        """
        return self._missing(self.scheduler.running, ahead)

    def _missing(self, requests: Iterable[Any], ahead: int) -> int:
        needed = 0
        for request in requests:
            # the last token of a request needs no place, and no step follows it
            most = request.num_prompt_tokens + request.max_tokens + len(request.spec_token_ids)
            longest = min(most, self.scheduler.max_model_len)
            tokens = min(
                request.num_computed_tokens + self.scheduler.max_num_scheduled_tokens,
                _tokens_with_outstanding(request) + ahead,
                longest - 1 + ahead,
            )
            if request.num_computed_tokens == 0:
                tokens = request.num_tokens + ahead  # vLLM admits a prompt when all of it fits
            needed += self._lacks(request, tokens)
        return max(0, needed - self.free_count())

    def _lacks(self, request: Any, tokens: int) -> int:
        """Return the blocks that a request needs beside its own to hold `tokens` tokens."""
        # a view: their ids are a copy
        owned = self.scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        return self.groups.missing(tokens, owned)
