"""The target's side: it pulls the KV of requests that arrive in a lane.

`Target.advance` is called between two steps. The methods below it stand in the order in which a
request passes through them. `incoming_requests.py` has the beginning and the end of an arrival.
"""

from collections.abc import Callable, Mapping

from flying_serving.layout.groups import aligned_group
from flying_serving.migration.arrival import Arrival, ArrivalPhase, PullRoute
from flying_serving.migration.chunks import Chunks
from flying_serving.migration.host import MigrationHost
from flying_serving.migration.incoming_requests import IncomingRequests
from flying_serving.migration.messages import KVPulled, PullKV
from flying_serving.migration.offers import Offer, Offers
from flying_serving.vllm_adapter.kv.blocks import SchedulerPool

BLOCKS_WAIT_S = 1.0
"""Seconds that a request waits for blocks for its KV, before it is prefilled instead."""
OPENING_S = 5.0
"""Seconds that a request waits for the offer: its owner may be in a long step."""
STALLED_S = 30.0
"""Seconds that a request waits for the first KV, or for more: its owner may have much other
work.
"""


class Target:
    """Pulls the KV of requests that arrive in lanes which this engine leads.

    `pools`: of these lanes, by group size. `offers`: of all engines. `pull_part`: copies
    this engine's part of the KV that a message names (`Migrations.pull_part`).
    """

    def __init__(
        self,
        engine: int,
        pools: Mapping[int, SchedulerPool],
        offers: Offers,
        incoming: IncomingRequests,
        host: MigrationHost,
        pull_part: Callable[[PullKV], None],
    ) -> None:
        self._engine = engine
        self._pools = pools
        self._offers = offers
        self._incoming = incoming
        self._host = host
        self._pull_part = pull_part
        self.chunks = Chunks(incoming.by_id, pools)
        self.has_more = False
        """True if the last `advance` left something that it could have pulled with more time."""

    def advance(self, now_s: float, limit_s: float | None) -> None:
        """Pull chunks for about `limit_s`, None: without limit, and admit requests that are here.

        A route is blocked behind a request that lacks blocks, or has come in part.
        """
        self.has_more = False
        blocked: set[PullRoute] = set()
        for arrival in self.chunks.in_order():
            offer = self._read_offer(arrival, now_s)
            needs_room = arrival.reserved_tokens < arrival.usable_tokens
            if offer is not None and arrival.route in blocked and needs_room:
                arrival.last_progress_s = now_s  # it is not its turn
            elif offer is not None:
                took_s = self._pull_next(arrival, offer, now_s, limit_s)
                if took_s is None and arrival.runs_here:  # a prefetch may wait for long
                    blocked.add(arrival.route)
                if took_s is not None and limit_s is not None:
                    limit_s -= took_s
                    if limit_s <= 0.0:
                        return
            if arrival.is_partial:
                blocked.add(arrival.route)

    def _read_offer(self, arrival: Arrival, now_s: float) -> Offer | None:
        """Return the offer for a request; None as long as it cannot be pulled, or members copy.

        The request gets no blocks before: its owner may wait for a request that waits for them.
        """
        if arrival.writers:
            return None
        offer = self._usable(arrival, self._offers.read(arrival.source))

        # nothing is offered yet
        if offer is None or not (offer.tokens or offer.is_final):
            if arrival.waited_s(now_s) > (OPENING_S if offer is None else STALLED_S):
                self._incoming.give_up(arrival)
            return None

        # nothing will be offered: the request does not wait for room
        if arrival.runs_here and not arrival.has_blocks and not offer.tokens:
            self._incoming.admit(arrival, 0)
            return None

        if arrival.phase is ArrivalPhase.EXPECTED:
            arrival.enter(ArrivalPhase.OFFERED)
            arrival.last_progress_s = now_s
        return offer

    def _usable(self, arrival: Arrival, offer: Offer | None) -> Offer | None:
        """Return the offer, without tokens if the request cannot use as few of them as it has
        here.
        """
        groups, most = self._pools[arrival.size].groups, arrival.usable_tokens
        if offer is None or groups.usable_tokens(most, offer.tokens) == most:
            return offer
        return Offer(0, is_final=True, blocks=[])

    def _pull_next(
        self,
        arrival: Arrival,
        offer: Offer,
        now_s: float,
        limit_s: float | None,
    ) -> float | None:
        """Begin to pull the next chunk, or end the arrival if there is none.

        Returns about how long the copy takes, and None if blocks are missing.
        """
        stop = self.chunks.next_stop(arrival, offer, now_s)
        if stop is None:
            self._wait_for_blocks(arrival, now_s)
            return None
        if stop > arrival.pulled_tokens:
            arrival.last_progress_s = now_s
            return self._begin_pull(arrival, offer, stop, limit_s)
        if arrival.offered_tokens(offer) <= arrival.pulled_tokens:
            self._end_or_wait(arrival, offer, now_s)
        return 0.0

    def _wait_for_blocks(self, arrival: Arrival, now_s: float) -> None:
        """Ask for missing blocks; after BLOCKS_WAIT_S admit the request without its KV."""
        if arrival.runs_here and arrival.waited_s(now_s) > BLOCKS_WAIT_S:
            self._incoming.admit(arrival, 0)
        elif not self.chunks.is_copying(arrival.size):
            self._host.ask_blocks(arrival.size, self.chunks.missing_blocks(arrival))

    def _end_or_wait(self, arrival: Arrival, offer: Offer, now_s: float) -> None:
        """Admit the request, as all offered KV is here, unless more is to come soon."""
        is_complete = offer.is_final or arrival.pulled_tokens == arrival.usable_tokens
        if arrival.runs_here and is_complete:
            self._incoming.admit(arrival, arrival.pulled_tokens)
        elif arrival.waited_s(now_s) > STALLED_S or self._pools[arrival.size].is_short():
            # its owner may wait for a request that waits for these blocks
            self._incoming.give_up(arrival)

    def _begin_pull(
        self,
        arrival: Arrival,
        offer: Offer,
        stop: int,
        limit_s: float | None,
    ) -> float:
        """Have the next tokens copied, up to `stop`, or to where time ends. Return the seconds."""
        stop, took_s = self.chunks.in_time(arrival, stop, limit_s)
        group = aligned_group(self._engine, arrival.size)
        message = PullKV(
            group,
            arrival.request_id,
            arrival.source,
            source_blocks=list(offer.blocks),
            blocks=arrival.blocks,
            tokens=range(arrival.pulled_tokens, stop),
            completes=stop == offer.tokens,
        )
        arrival.source_tokens = offer.tokens

        arrival.pulling_tokens = stop
        arrival.enter(ArrivalPhase.PULLING)
        if arrival.size == 1:
            self._pull_part(message)
            self._end_pull(arrival)
            self.has_more |= stop < arrival.offered_tokens(offer)
        else:
            arrival.writers = set(group)
            self._host.send(group, message)
        return took_s

    def member_pulled(self, message: KVPulled) -> None:
        """Note that a member of a group has its part."""
        arrival = self._incoming.by_id[message.request_id]
        arrival.writers.discard(message.engine)
        if not arrival.writers:
            self._end_pull(arrival)

    def _end_pull(self, arrival: Arrival) -> None:
        """End a pull of which all members have their parts. They count if the copied KV is still
        offered.
        """
        offer = self._offers.read(arrival.source)
        if offer is not None and offer.tokens >= arrival.pulling_tokens:
            arrival.pulled_tokens = arrival.pulling_tokens
            self._pools[arrival.size].note_hits(arrival.request, offer.hit_tokens)
        else:  # whole tiles were copied, and with them tokens of the block where the copy began
            self.chunks.roll_back(arrival)

        if arrival.has_ended:
            self._incoming.free(arrival)
            return
        arrival.enter(ArrivalPhase.RESERVED)
        if arrival.runs_here and arrival.pulled_tokens == arrival.usable_tokens:
            self._incoming.admit(arrival, arrival.pulled_tokens)
        elif offer is not None and arrival.is_chunked(offer):
            self._incoming.release(arrival, arrival.pulled_tokens)
