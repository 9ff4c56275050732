"""Faults that can be injected: the exploration has to find each."""

from __future__ import annotations

from enum import Enum
from typing import Any

from flying_serving.migration.arrival import Arrival
from flying_serving.migration.messages import KVPulled, PullKV
from flying_serving.migration.migrations import Migrations
from flying_serving.migration.offers import Offer
from flying_serving.migration.source import Source
from flying_serving.migration.target import Target
from tests.protocol.offers import Table


class Fault(Enum):
    """What is broken."""

    NOT_AT_ONCE = "a message gets its place in one inbox after the other"
    BY_ARRIVAL = "messages are served as they arrive, and not in their places"
    GRANT_DROPPED = "grants of engine 1 get lost"
    COMMIT_DROPPED = "commits for engine 1 get lost"
    STEP_TWICE = "steps of two arrive twice at engine 1"
    ADDED_TWICE = "the client sends requests for groups twice"
    NOT_ADDED = "requests for engine 2 get lost"
    PUBLISHED_EARLY = "a leader offers KV of a step that is still under way, of a request that runs"
    RETAINED_EARLY = "a leader offers KV of a step that is still under way, of a request that leaves"
    RELEASED_EARLY = "a leader frees the blocks of a request that has left while their offer stands"
    NOT_REVOKED = "an offer is not revoked when its blocks are freed"
    REOPENED = "a request that was preempted is offered again under its number"
    NOT_YIELDED = "KV that nobody pulls keeps its blocks, though a request needs them"
    YIELDED_UNREVOKED = "KV yields its blocks to a request while its offer stands"
    ADMITTED_EARLY = "a scheduler gets a request before all members have pulled its KV"
    NOT_COMPARED = "what was copied counts, whether it is still offered or not"
    NOT_LEFT = "a request that goes on elsewhere before it has arrived stays"
    NO_NEXT_BLOCK = "KV arrives in blocks that leave no room for the next token"
    SET_ASIDE_EARLY = "blocks are set aside for KV before any is offered"
    FREED_EARLY = "an owner is told that tokens are pulled before they are"
    KEEPS_BLOCKS = "a request whose KV is still computed keeps its blocks, though its lane is short of them"
    NOT_LOOKED_AGAIN = "KV that a member has moved while it was copied counts"
    NOT_ALL_READY = "weights go as soon as one engine of the group is ready to lend"
    NOT_EMPTY = "pages go back to weights while their blocks are in use"
    NOT_REPLACED = "a member's table says where KV was before it was copied"
    TABLES_KEPT = "running requests keep the blocks that their KV was copied from"


class _PublishedEarly(Source):
    def publish(self) -> None:
        requests = [request for pool in self._pools.values() for request in pool.scheduler.requests.values()]
        in_flight = [request.num_in_flight_tokens for request in requests]
        for request in requests:
            request.num_in_flight_tokens = 0
        super().publish()
        for request, tokens in zip(requests, in_flight, strict=True):
            request.num_in_flight_tokens = tokens


class _RetainedEarly(Source):
    def retain(self, request_id: str, number: int) -> None:
        here = [pool.scheduler.requests for pool in self._pools.values()]
        computed = [requests[request_id].num_computed_tokens for requests in here if request_id in requests]
        super().retain(request_id, number)
        if number in self.retained:
            self._table.publish(number, computed[0], self.retained[number].blocks, final=True)


class _ReleasedEarly(Source):
    def keep(self, number: int, size: int, request_id: str, tokens: int) -> None:
        super().keep(number, size, request_id, tokens)
        if number in self.retained:
            self._pools[size].unpin(self.retained.pop(number).blocks)


class _NotYielded(Source):
    def yield_blocks(self, size: int, now_s: float) -> bool:
        return False


class _YieldedUnrevoked(Source):
    def yield_blocks(self, size: int, now_s: float) -> bool:
        self._table.revoke = lambda number: None  # type: ignore[method-assign]
        try:
            return super().yield_blocks(size, now_s)
        finally:
            del self._table.revoke


class _Reopened(Source):
    def _freed(self, size: int, request: Any) -> None:
        offered = self.running.get(request.request_id)
        super()._freed(size, request)
        if offered is not None and not request.is_finished():
            self.running[request.request_id] = offered


class _NeverRevoked(Table):
    def revoke(self, number: int) -> None:
        if number not in self.offers:
            super().revoke(number)


class _AdmittedEarly(Target):
    def pulled(self, message: KVPulled) -> None:
        arrival = self.arrivals.get(message.request_id)
        if arrival is not None and arrival.pulling:
            arrival.pulling.clear()
            self._pulled(arrival)


class _NotCompared(Target):
    def _pulled(self, arrival: Arrival) -> None:
        self.chunks.void = _count_all  # type: ignore[method-assign]
        try:
            super()._pulled(arrival)
        finally:
            del self.chunks.void


def _count_all(arrival: Arrival) -> None:
    arrival.pulled_tokens = arrival.pulling_tokens


class _NotLeft(Target):
    def leave(self, request_id: str, number: int) -> bool:
        return request_id in self.arrivals


class _NoNextBlock(Target):
    def _aim(self, arrival: Arrival, offer: Offer, now_s: float) -> int | None:
        manager = self._pools[arrival.size].scheduler.kv_cache_manager
        take = manager.allocate_slots
        manager.allocate_slots = lambda *request, num_lookahead_tokens, **options: take(*request, **options)
        try:
            return super()._aim(arrival, offer, now_s)
        finally:
            del manager.allocate_slots


class _SetAsideEarly(Target):
    def _opened(self, arrival: Arrival, now_s: float) -> Offer | None:
        if arrival.blocks is None and not self.chunks.reserve(arrival, arrival.usable_tokens, now_s):
            self._ask_blocks(arrival.size, self.chunks.missing(arrival))
        return super()._opened(arrival, now_s)


class _FreedEarly(Target):
    def _begin(self, arrival: Arrival, offer: Offer, stop: int, limit_s: float | None) -> float:
        if arrival.is_cut(offer):
            self._release(arrival, stop)
        return super()._begin(arrival, offer, stop, limit_s)


class _KeepsBlocks(Target):
    def _advance(self, arrival: Arrival, offer: Offer, stop: int, now_s: float, limit_s: float | None) -> float:
        pool = self._pools[arrival.size]
        pool.is_short = lambda: False  # type: ignore[method-assign]
        try:
            return super()._advance(arrival, offer, stop, now_s, limit_s)
        finally:
            del pool.is_short


class _NotLookedAgain(Migrations):
    def pull(self, message: PullKV) -> None:
        places = self._places(message)
        self._places = lambda message: places  # type: ignore[method-assign]
        try:
            super().pull(message)
        finally:
            del self._places


SOURCES: dict[Fault | None, type[Source]] = {
    Fault.PUBLISHED_EARLY: _PublishedEarly,
    Fault.RETAINED_EARLY: _RetainedEarly,
    Fault.RELEASED_EARLY: _ReleasedEarly,
    Fault.REOPENED: _Reopened,
    Fault.NOT_YIELDED: _NotYielded,
    Fault.YIELDED_UNREVOKED: _YieldedUnrevoked,
}
TARGETS: dict[Fault | None, type[Target]] = {
    Fault.ADMITTED_EARLY: _AdmittedEarly,
    Fault.NOT_COMPARED: _NotCompared,
    Fault.NOT_LEFT: _NotLeft,
    Fault.NO_NEXT_BLOCK: _NoNextBlock,
    Fault.SET_ASIDE_EARLY: _SetAsideEarly,
    Fault.FREED_EARLY: _FreedEarly,
    Fault.KEEPS_BLOCKS: _KeepsBlocks,
}


def inject(fault: Fault | None, migrations: Migrations, table: Table) -> None:
    """Break migrations, if that is the fault."""
    migrations.source.__class__ = SOURCES.get(fault, Source)
    migrations.__class__ = _NotLookedAgain if fault is Fault.NOT_LOOKED_AGAIN else Migrations
    migrations.target.__class__ = TARGETS.get(fault, Target)
    table.__class__ = _NeverRevoked if fault is Fault.NOT_REVOKED else Table
