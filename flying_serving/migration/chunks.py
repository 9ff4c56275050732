"""The size of the chunks of an arrival, and the blocks for them (Gyges, section 4.2).

The owner frees a chunk when it is here, so a request never holds all of its blocks twice.
"""

from collections.abc import Mapping

from flying_serving.migration.arrival import Arrival, ArrivalPhase, PullRoute
from flying_serving.migration.offers import Offer
from flying_serving.vllm_adapter.kv.blocks import SchedulerPool

EXTRA_BYTES = 32 * 2**20
"""Upper bound on the KV of a device that is held twice during migrations."""


class Chunks:
    """The chunks of all arrivals of an engine. `pools`: of its lanes, by group size.

    `blocks`: KV blocks that may be copied at a time from one group to one lane.
    """

    def __init__(
        self,
        arrivals: Mapping[str, Arrival],
        pools: Mapping[int, SchedulerPool],
        blocks: int = 1,
    ) -> None:
        self._arrivals = arrivals
        self._pools = pools
        self.blocks = blocks
        self.token_s: dict[int, float] = {}
        """Seconds that pulling a token takes, by group size, where it was measured."""

    def in_order(self) -> list[Arrival]:
        """Return all arrivals, in the order in which they are pulled.

        First the route whose first request has the fewest tokens here, so all routes make the same
        progress. On each route a request that has come in part is the first.
        """
        partial_first = sorted(self._arrivals.values(), key=lambda arrival: not arrival.is_partial)
        progress_tokens: dict[PullRoute, int] = {}
        for arrival in partial_first:
            progress_tokens.setdefault(arrival.route, arrival.pulled_tokens)
        return sorted(partial_first, key=lambda arrival: progress_tokens[arrival.route])

    def next_stop(self, arrival: Arrival, offer: Offer, now_s: float) -> int | None:
        """Return the token before which the next pull ends, with blocks set aside for it.

        It is `pulled_tokens` while other chunks fill the route, and None if there are too few
        blocks.
        """
        while True:
            pulled_tokens, offered_tokens = arrival.pulled_tokens, arrival.offered_tokens(offer)

            # where does the next chunk end?
            stop: int | None = offered_tokens
            if arrival.is_chunked(offer) and offered_tokens > pulled_tokens:
                stop = self._chunk_stop(arrival, offered_tokens)
            if stop is None or pulled_tokens == stop < offered_tokens:
                return stop

            # With the last chunk come blocks for all usable tokens and the next one. So each
            # request that is admitted can make its step.
            tokens = stop if stop < offered_tokens else arrival.usable_tokens
            if arrival.has_blocks and arrival.reserved_tokens >= tokens:
                return stop
            if not self.reserve(arrival, tokens, now_s):
                return None

            # the prefix cache may have some of the tokens: the chunk begins behind them
            if arrival.pulled_tokens == pulled_tokens:
                return stop

    def reserve(self, arrival: Arrival, tokens: int, now_s: float) -> bool:
        """Set blocks aside for the first tokens of a request. Return False if there are too few."""
        pool = self._pools[arrival.size]
        needs_next = tokens == arrival.usable_tokens

        if arrival.has_blocks:
            blocks = pool.extend(arrival.request, tokens, next_token=needs_next)
            if blocks is None:
                return False
            arrival.blocks = blocks
        else:
            prepared = pool.prepare(arrival.request, tokens, next_token=needs_next)
            if prepared is None:
                return False
            arrival.cached_tokens, arrival.blocks = prepared
            arrival.pulled_tokens = arrival.cached_tokens
            arrival.forgotten = pool.forgotten
            arrival.enter(ArrivalPhase.RESERVED)

        arrival.reserved_tokens = tokens
        arrival.last_progress_s = now_s
        if arrival.is_partial:
            self._renew_patience(arrival.size, now_s)
        return True

    def _renew_patience(self, size: int, now_s: float) -> None:
        """Renew the patience of all requests of a lane, as one made progress: when it is here, more
        blocks are free.
        """
        for arrival in self._of_lane(size):
            if arrival.runs_here and arrival.phase is not ArrivalPhase.EXPECTED:
                arrival.last_progress_s = now_s

    def in_time(self, arrival: Arrival, stop: int, limit_s: float | None) -> tuple[int, float]:
        """Return how far a request can be pulled in `limit_s`, at least by a block, and the
        seconds.
        """
        first, token_s = arrival.pulled_tokens, self.token_s.get(arrival.size, 0.0)
        if limit_s is not None and token_s:
            block_tokens = self._pools[arrival.size].groups.block_tokens
            stop = min(stop, first + max(block_tokens, int(limit_s / token_s)))
        return stop, (stop - first) * token_s

    def roll_back(self, arrival: Arrival) -> None:
        """Discount the last copy, and the block in which it began; cached blocks are whole."""
        block_tokens = self._pools[arrival.size].groups.block_tokens
        arrival.pulled_tokens = arrival.pulled_tokens // block_tokens * block_tokens

    def missing_blocks(self, arrival: Arrival) -> int:
        """Return how many blocks are missing for all tokens that a request can use and the next
        one.
        """
        pool = self._pools[arrival.size]
        return pool.missing_for(arrival.usable_tokens, len(arrival.blocks))

    def is_copying(self, size: int) -> bool:
        """Return whether members copy a chunk into a lane. The owner has blocks to lend after that.

        Asked now it would answer that it has none, and be asked again only after a while.
        """
        return any(arrival.writers for arrival in self._of_lane(size))

    def _chunk_stop(self, arrival: Arrival, offered_tokens: int) -> int | None:
        """Return where the next chunk ends: with a block, or with the offer; None without a free
        block.
        """
        pool, pulled_tokens = self._pools[arrival.size], arrival.pulled_tokens
        block_tokens, free_blocks = pool.groups.block_tokens, pool.free_count()

        # blocks that may be copied beside the chunks that are under way
        chunk_blocks = self.blocks - self._under_way_tokens(arrival) // block_tokens
        if chunk_blocks <= 0:
            return pulled_tokens

        # Each source group gets its share of the free blocks, and so blocks back on its engines. A
        # block of a group that has no other free block is of use to no lane.
        groups = {other.source.group for other in self._of_lane(arrival.size)}
        share_blocks = max(min(free_blocks, 1), free_blocks // len(groups))
        room_tokens = pool.groups.room_tokens(arrival.blocks, share_blocks)
        stop = min(pulled_tokens + chunk_blocks * block_tokens, room_tokens)
        stop = stop // block_tokens * block_tokens
        return min(stop, offered_tokens) if stop > pulled_tokens else None

    def _of_lane(self, size: int) -> list[Arrival]:
        return [arrival for arrival in self._arrivals.values() if arrival.size == size]

    def _under_way_tokens(self, arrival: Arrival) -> int:
        """Return the number of tokens that members copy on the same route."""
        return sum(
            other.pulling_tokens - other.pulled_tokens
            for other in self._arrivals.values()
            if other.writers and other.route == arrival.route
        )
