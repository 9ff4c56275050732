"""The target's side: a group's leader sets blocks aside for requests that come, pulls their KV and admits them."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from vllm.v1.request import Request

from flying_serving.layout.groups import Group, aligned_group
from flying_serving.migration.arrival import Arrival, Chunks
from flying_serving.migration.messages import KVPulled, PullKV, ReleaseKV
from flying_serving.migration.offers import Offer, Offers
from flying_serving.vllm_adapter.blocks import SchedulerPool

PATIENCE_S = 1.0
"""How long a request waits for blocks for its KV, before it is prefilled instead."""
OPENING_S = 5.0
"""How long it waits for the offer: its owner may be in a long step."""
STALLED_S = 30.0
"""How long it waits for more KV than there is, or for the first: its owner may have much else to compute."""


class Target:
    """Requests that come, with their KV, to lanes which this engine leads.

    `pools`: of these lanes, by group size. `pull` copies what a PullKV says to this engine's devices. `admit` gives a
    request to the scheduler of the lane of this size. `keep` keeps blocks of a request for yet another target: a
    number, the size, its id, and tokens. `ask_blocks` is told a group size, and how many blocks are missing there.
    """

    def __init__(
        self,
        engine: int,
        pools: Mapping[int, SchedulerPool],
        offers: Offers,
        send: Callable[[Group, Any], None],
        pull: Callable[[PullKV], None],
        admit: Callable[[Request, int], None],
        keep: Callable[[int, int, str, int], None],
        ask_blocks: Callable[[int, int], None],
    ) -> None:
        self._engine = engine
        self._pools = pools
        self._offers = offers
        self._send = send
        self._pull = pull
        self._admit = admit
        self._keep = keep
        self._ask_blocks = ask_blocks
        self.arrivals: dict[str, Arrival] = {}
        self.chunks = Chunks(self.arrivals, pools)
        self.goes_on = False
        self.migrated = 0
        self.migrated_tokens = 0
        self.prefilled_again = 0

    def expect(self, arrival: Arrival) -> None:
        """A request comes; one that was pulled ahead goes on here from now on, with what is pulled."""
        before = self.arrivals.setdefault(arrival.request_id, arrival)
        if before is not arrival:
            before.request, before.ahead_tokens = arrival.request, None
            before.since_s, before.grown_s = arrival.since_s, None

    def abort(self, request_ids: Iterable[str]) -> None:
        """Requests have ended."""
        for arrival in [self.arrivals[each] for each in request_ids if each in self.arrivals]:
            arrival.aborted = True
            self._drop_if_idle(arrival)

    def leave(self, request_id: str, number: int) -> bool:
        """A request goes on elsewhere before it has arrived; False if it is not on its way here."""
        arrival = self.arrivals.get(request_id)
        if arrival is not None:
            arrival.left = number
            self._drop_if_idle(arrival)
        return arrival is not None

    def _drop_if_idle(self, arrival: Arrival) -> None:
        """Forget a request that ends or leaves, unless members still write into its blocks."""
        if arrival.pulling or not (arrival.aborted or arrival.left is not None):
            return
        if arrival.left is not None and not arrival.aborted:
            is_more = arrival.pulled_tokens > arrival.start_tokens  # which a step under way may be yet to compute
            self._keep(arrival.left, arrival.size, arrival.request_id, is_more * arrival.pulled_tokens)
        self._over(arrival)
        if arrival.blocks is not None:
            self._pools[arrival.size].release(arrival.request)

    def advance(self, now_s: float, limit_s: float | None) -> None:
        """Pull chunks, for about `limit_s` if given, and admit requests whose KV is here; `goes_on`: there is more."""
        self.goes_on, full = False, set[tuple[Group, int]]()
        for arrival in self.chunks.evenly():
            way = arrival.source.group, arrival.size
            offer = None if arrival.pulling else self._opened(arrival, now_s)
            if offer is not None and way in full and arrival.room_tokens < arrival.usable_tokens:
                arrival.grown_s = now_s  # it is not its turn
            elif offer is not None:
                stop = self._aim(arrival, offer, now_s)
                if stop is not None:
                    took_s = self._advance(arrival, offer, stop, now_s, limit_s)
                    if limit_s is not None and (limit_s := limit_s - took_s) <= 0.0:
                        return
                elif arrival.ahead_tokens is None:  # who is pulled ahead may wait for long
                    full.add(way)
            if arrival.is_partial:
                full.add(way)

    def _opened(self, arrival: Arrival, now_s: float) -> Offer | None:
        """What is offered; None until it is. Then it has no blocks yet: its owner may wait for a request that waits."""
        offer = self._offers.read(arrival.source)
        if offer is None or not (offer.tokens or offer.is_final):
            if now_s - arrival.since_s > (OPENING_S if offer is None else STALLED_S):
                self._give_up(arrival)
            return None
        if arrival.blocks is None and arrival.ahead_tokens is None and offer.is_final and not offer.tokens:
            self._arrived(arrival, 0)  # without waiting for room: there is nothing to come
            return None
        if arrival.grown_s is None:
            arrival.grown_s = now_s
        return offer

    def _aim(self, arrival: Arrival, offer: Offer, now_s: float) -> int | None:
        """See `Chunks.aim`; a request for which there are too few blocks for PATIENCE_S comes without its KV."""
        stop = self.chunks.aim(arrival, offer, now_s)
        if stop is None and arrival.waited_s(now_s) > PATIENCE_S and arrival.ahead_tokens is None:
            self._arrived(arrival, 0)
        elif stop is None and not self.chunks.is_on_its_way(arrival.size):
            self._ask_blocks(arrival.size, self.chunks.missing(arrival))
        return stop

    def _advance(self, arrival: Arrival, offer: Offer, stop: int, now_s: float, limit_s: float | None) -> float:
        """Pull a chunk, or find that there is nothing more to pull. Returns about how long it takes."""
        if stop > arrival.pulled_tokens:
            arrival.grown_s = now_s
            return self._begin(arrival, offer, stop, limit_s)
        if arrival.offered_tokens(offer) > arrival.pulled_tokens:
            return 0.0
        if arrival.ahead_tokens is None and (offer.is_final or arrival.pulled_tokens == arrival.usable_tokens):
            self._arrived(arrival, arrival.pulled_tokens)
        elif arrival.waited_s(now_s) > STALLED_S or self._pools[arrival.size].is_short():
            self._give_up(arrival)  # its owner may wait for a request that waits for these blocks
        return 0.0

    def forget_kv(self) -> None:
        """Let go what was pulled: requests that are to run here run without."""
        for arrival in list(self.arrivals.values()):
            arrival.pulled_tokens = 0
            self._give_up(arrival)

    def _give_up(self, arrival: Arrival) -> None:
        """No more of its KV comes: let a request run with what there is, if it is to run here; else its blocks go."""
        if arrival.ahead_tokens is None:
            self._arrived(arrival, arrival.pulled_tokens)
        else:  # it may be pulled at once when it comes to run here
            del self.arrivals[arrival.request_id]
            if arrival.blocks is not None:
                self._pools[arrival.size].release(arrival.request)

    def _begin(self, arrival: Arrival, offer: Offer, stop: int, limit_s: float | None) -> float:
        """Have the next tokens copied, up to `stop`."""
        assert arrival.blocks is not None
        stop, took_s = self.chunks.in_time(arrival, stop, limit_s)
        group, theirs = aligned_group(self._engine, arrival.size), list(offer.blocks)
        tokens = range(arrival.pulled_tokens, stop)
        message = PullKV(group, arrival.request_id, arrival.source, theirs, arrival.blocks, tokens)
        arrival.pulling_tokens = stop
        if arrival.size == 1:
            self._pull(message)
            self._pulled(arrival)
            self.goes_on |= stop < arrival.offered_tokens(offer)
        else:
            arrival.pulling = set(group)
            self._send(group, message)
        return took_s

    def pulled(self, message: KVPulled) -> None:
        """A member has its part."""
        arrival = self.arrivals[message.request_id]
        arrival.pulling.discard(message.engine)
        if not arrival.pulling:
            self._pulled(arrival)

    def _pulled(self, arrival: Arrival) -> None:
        """All members have their parts: they count if what they have copied is still offered."""
        offer = self._offers.read(arrival.source)
        if offer is not None and offer.tokens >= arrival.pulling_tokens:
            arrival.pulled_tokens = arrival.pulling_tokens
        else:  # whole tiles were copied, so tokens of the block in which the copy began may be gone too
            self.chunks.void(arrival)
        if arrival.aborted or arrival.left is not None:
            self._drop_if_idle(arrival)
        elif arrival.ahead_tokens is None and arrival.pulled_tokens == arrival.usable_tokens:
            self._arrived(arrival, arrival.pulled_tokens)
        elif offer is not None and arrival.is_cut(offer):
            self._release(arrival, arrival.pulled_tokens)

    def _arrived(self, arrival: Arrival, tokens: int) -> None:
        """The KV of the first `tokens` tokens of a request is here: it runs."""
        pool, request = self._pools[arrival.size], arrival.request
        if tokens > arrival.start_tokens:
            pool.arrived(request, tokens)
            self.migrated, self.migrated_tokens = (
                self.migrated + 1,
                self.migrated_tokens + tokens - arrival.start_tokens,
            )
        else:
            if arrival.blocks is not None:
                pool.release(request)
            self.prefilled_again += arrival.start_tokens < request.num_tokens - 1
        self._over(arrival)
        self._admit(request, arrival.size)

    def _over(self, arrival: Arrival) -> None:
        """The owner may let the KV go, but not for one that was only pulled ahead: a third group may go on with it."""
        del self.arrivals[arrival.request_id]
        if arrival.ahead_tokens is None:
            self._release(arrival)

    def _release(self, arrival: Arrival, tokens: int | None = None) -> None:
        """Tell the owner that it may free what it has of a request, or of its first tokens."""
        owner = arrival.source.group[:1]
        self._send(owner, ReleaseKV(owner, arrival.source.number, tokens))
