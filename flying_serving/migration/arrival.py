"""A request that comes to a group with its KV, and how much of that is pulled at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.v1.request import Request

from flying_serving.layout.groups import Group
from flying_serving.migration.offers import KVSource, Offer
from flying_serving.vllm_adapter.blocks import SchedulerPool


@dataclass
class Arrival:
    """A request, as vLLM made it, that comes with its KV to a group of `size` engines.

    `since_s`: when it was expected. `ahead_tokens`: it still runs elsewhere, until it has so many tokens with KV; None
    once it is to run here. `blocks`: set aside for it, for its first `room_tokens` tokens; None until it is offered,
    and there are enough. `start_tokens`: its first tokens that the prefix cache has. `pulled_tokens`: those with KV
    here, `grown_s`: when there were last more, or room for more, or it was not its turn; None before it is offered.
    `pulling`: members that have not answered, and `pulling_tokens` what is pulled when all have. `left`: it goes on to
    yet another group, which gets its KV under this number. `aborted`: by its client.
    """

    request: Request
    size: int
    source: KVSource
    since_s: float
    ahead_tokens: int | None = None
    blocks: list[int] | None = None
    room_tokens: int = 0
    start_tokens: int = 0
    pulled_tokens: int = 0
    grown_s: float | None = None
    pulling: set[int] = field(default_factory=set)
    pulling_tokens: int = 0
    left: int | None = None
    aborted: bool = False

    @property
    def request_id(self) -> str:
        """vLLM's, here."""
        return str(self.request.request_id)

    @property
    def usable_tokens(self) -> int:
        """All that it can use: the last token has to be computed for the next."""
        return int(self.request.num_tokens - 1) if self.ahead_tokens is None else self.ahead_tokens

    def waited_s(self, now_s: float) -> float:
        """Seconds since `grown_s`."""
        return 0.0 if self.grown_s is None else now_s - self.grown_s

    def offered_tokens(self, offer: Offer) -> int:
        """Those that are offered and that it can use."""
        return min(offer.tokens, self.usable_tokens)

    @property
    def is_partial(self) -> bool:
        """Whether blocks are set aside for a part of it."""
        return 0 < self.room_tokens < self.usable_tokens

    def is_cut(self, offer: Offer) -> bool:
        """Whether it is pulled in chunks, each of which frees its owner's blocks: the request has left its owner."""
        return offer.is_final and self.ahead_tokens is None


EXTRA_BYTES = 32 * 2**20
"""Of KV memory of an engine that requests which come may have beside those that they come from."""


class Chunks:
    """How much of an arrival is pulled at a time (Gyges, section 4.2): its owner frees a chunk when it is here.

    `pools`: of the lanes, by group size. `blocks`: of KV that may be on its way from one group to one lane.
    """

    def __init__(self, arrivals: Mapping[str, Arrival], pools: Mapping[int, SchedulerPool], blocks: int = 1) -> None:
        self._arrivals = arrivals
        self._pools = pools
        self.blocks = blocks
        self.token_s: dict[int, float] = {}
        """By group size, how long pulling a token takes, as far as it was measured."""

    def aim(self, arrival: Arrival, offer: Offer, now_s: float) -> int | None:
        """The token before which the next pull of a request ends, with blocks for it; None if there are too few.

        With the last that is offered come blocks for all that it can use and the next token: so of requests that have
        arrived each can make its step. Where it has come to already: others are on their way.
        """
        while True:
            pulled, offered = arrival.pulled_tokens, arrival.offered_tokens(offer)
            stop = self._stop(arrival, offered) if arrival.is_cut(offer) and offered > pulled else offered
            if stop is None or pulled == stop < offered:
                return stop
            tokens = stop if stop < offered else arrival.usable_tokens
            if arrival.blocks is not None and arrival.room_tokens >= tokens:
                return stop
            if not self.reserve(arrival, tokens, now_s):
                return None
            if arrival.pulled_tokens == pulled:  # else the prefix cache has some of them
                return stop

    def reserve(self, arrival: Arrival, tokens: int, now_s: float) -> bool:
        """Set blocks aside for the first tokens of a request, if there are enough."""
        pool, needs_next = self._pools[arrival.size], tokens == arrival.usable_tokens
        room = (
            pool.prepare(arrival.request, tokens, next_token=needs_next)
            if arrival.blocks is None
            else pool.extend(arrival.request, tokens, next_token=needs_next)
        )
        if room is None:
            return False
        start_tokens, blocks = room
        if arrival.blocks is None:
            arrival.start_tokens = arrival.pulled_tokens = start_tokens
        arrival.blocks, arrival.room_tokens = blocks, tokens
        arrival.grown_s = now_s
        for one in self._arrivals.values() if arrival.is_partial else ():  # when it is here, more blocks are free
            if one.size == arrival.size and one.grown_s is not None and one.ahead_tokens is None:
                one.grown_s = now_s
        return True

    def evenly(self) -> list[Arrival]:
        """All arrivals, first from groups of whose first request least has come; what has come in part is the first."""
        begun_first = sorted(self._arrivals.values(), key=lambda one: not one.is_partial)
        first: dict[tuple[Group, int], int] = {}
        for one in begun_first:
            first.setdefault((one.source.group, one.size), one.pulled_tokens)
        return sorted(begun_first, key=lambda one: first[one.source.group, one.size])

    def in_time(self, arrival: Arrival, stop: int, limit_s: float | None) -> tuple[int, float]:
        """How far a request can be pulled in `limit_s`, at least by a block, and about how long that takes."""
        first, token_s = arrival.pulled_tokens, self.token_s.get(arrival.size, 0.0)
        if limit_s is not None and token_s:
            block_tokens = self._pools[arrival.size].scheduler.block_size
            stop = min(stop, first + max(block_tokens, int(limit_s / token_s)))
        return stop, (stop - first) * token_s

    def void(self, arrival: Arrival) -> None:
        """Only whole blocks that were pulled before the last pull count; those of the prefix cache are whole."""
        block_tokens = self._pools[arrival.size].scheduler.block_size
        arrival.pulled_tokens = max(arrival.start_tokens, arrival.pulled_tokens // block_tokens * block_tokens)

    def missing(self, arrival: Arrival) -> int:
        """Blocks that are missing for all that a request can use and the next token."""
        return self._pools[arrival.size].missing_for(arrival.usable_tokens, len(arrival.blocks or ()))

    def is_on_its_way(self, size: int) -> bool:
        """Whether members copy a chunk into a lane: its owner has more blocks to lend when it is here, and not before.

        Asked now it would answer that it has none, and be asked again only after a while.
        """
        return any(one.pulling for one in self._arrivals.values() if one.size == size)

    def _stop(self, arrival: Arrival, offered: int) -> int | None:
        """Where the next chunk would end: at the end of a block, or of what is offered; None without a free block.

        A request has its share of the free blocks, so that each group from which some come gets blocks free: those of a
        group that has none free can be used by none.
        """
        pool, pulled = self._pools[arrival.size], arrival.pulled_tokens
        block_tokens, free = pool.scheduler.block_size, pool.free_count()
        ways = {one.source.group for one in self._arrivals.values() if one.size == arrival.size}
        room = self.blocks - self._under_way(arrival) // block_tokens
        has = (len(arrival.blocks or ()) + max(min(free, 1), free // len(ways))) * block_tokens
        stop = min(pulled + max(0, room) * block_tokens, has) // block_tokens * block_tokens
        if stop > pulled or room <= 0:
            return min(max(stop, pulled), offered)
        return None

    def _under_way(self, arrival: Arrival) -> int:
        """Tokens that members copy from the same group into the same lane."""
        return sum(
            one.pulling_tokens - one.pulled_tokens
            for one in self._arrivals.values()
            if one.pulling and one.size == arrival.size and one.source.group == arrival.source.group
        )
