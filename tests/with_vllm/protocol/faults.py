"""Faults that can be injected: the exploration has to find each."""

from __future__ import annotations

from enum import Enum
from typing import Any

from flying_serving.migration.arrival import Arrival, ArrivalPhase
from flying_serving.migration.chunks import Chunks
from flying_serving.migration.incoming_requests import IncomingRequests
from flying_serving.migration.messages import KVPulled, PullKV
from flying_serving.migration.migrations import Migrations
from flying_serving.migration.offers import Offer
from flying_serving.migration.source import Source
from flying_serving.migration.target import Target
from tests.with_vllm.protocol.offers import Table


class Fault(Enum):
    """What is broken."""

    NOT_AT_ONCE = "a message gets its place in one inbox after the other"
    BY_ARRIVAL = "messages are served as they arrive, and not in their places"
    RESERVED_DROPPED = "what engine 1 says that it has reserved gets lost"
    LEND_DROPPED = "orders to engine 1 to lend blocks get lost"
    STEP_TWICE = "steps of two arrive twice at engine 1"
    ADDED_TWICE = "the client sends requests for groups twice"
    NOT_ADDED = "requests for engine 2 get lost"
    PUBLISHED_EARLY = "a leader offers KV of a step that is still under way, of a request that runs"
    RETAINED_EARLY = (
        "a leader offers KV of a step that is still under way, of a request that leaves"
    )
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
    KEEPS_BLOCKS = (
        "a request whose KV is still computed keeps its blocks, though its lane is short of them"
    )
    NOT_LOOKED_AGAIN = "KV that a member has moved while it was copied counts"
    NOT_ALL_READY = "weights go as soon as one engine of the group is ready to lend"
    NOT_EMPTY = "pages go back to weights while their blocks are in use"
    NOT_REPLACED = "a member's table says where KV was before it was copied"
    TABLES_KEPT = "running requests keep the blocks that their KV was copied from"
    TOKENS_NOT_COMPARED = "a leader does not compare the tokens that members have sampled"
    GOES_ON_APART = "a leader gives out tokens though a member has sampled others before"
    ANEW_DROPPED = "engine 1 is not told to begin anew"
    ANEW_NOT_SHOWN = "a member that begins anew still shows its old checksum"


class _PublishedEarly(Source):
    def publish(self) -> None:
        requests = [
            request for pool in self._pools.values() for request in pool.scheduler.requests.values()
        ]
        in_flight = [request.num_in_flight_tokens for request in requests]
        for request in requests:
            request.num_in_flight_tokens = 0
        super().publish()
        for request, tokens in zip(requests, in_flight, strict=True):
            request.num_in_flight_tokens = tokens


class _RetainedEarly(Source):
    def retain(self, request_id: str, number: int) -> None:
        here = [pool.scheduler.requests for pool in self._pools.values()]
        computed = [
            requests[request_id].num_computed_tokens for requests in here if request_id in requests
        ]
        super().retain(request_id, number)
        if number in self.retained:
            self._table.publish(number, computed[0], self.retained[number].blocks, final=True)


class _ReleasedEarly(Source):
    def pin_and_offer(self, number: int, size: int, request_id: str, tokens: int) -> None:
        super().pin_and_offer(number, size, request_id, tokens)
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
    def blocks_freed(self, size: int, request: Any) -> None:
        offered = self.running.get(request.request_id)
        super().blocks_freed(size, request)
        if offered is not None and not request.is_finished():
            self.running[request.request_id] = offered


class _NeverRevoked(Table):
    def revoke(self, number: int) -> None:
        if number not in self.offers:
            super().revoke(number)


class _AdmittedEarly(Target):
    def member_pulled(self, message: KVPulled) -> None:
        arrival = self._incoming.by_id.get(message.request_id)
        if arrival is not None and arrival.writers:
            arrival.writers.clear()
            self._end_pull(arrival)


class _NotCompared(Target):
    def _end_pull(self, arrival: Arrival) -> None:
        self.chunks.roll_back = _count_all  # type: ignore[method-assign]
        try:
            super()._end_pull(arrival)
        finally:
            del self.chunks.roll_back


def _count_all(arrival: Arrival) -> None:
    arrival.pulled_tokens = arrival.pulling_tokens


class _NotLeft(IncomingRequests):
    def forward(self, request_id: str, number: int) -> bool:
        return request_id in self.by_id


class _NoNextBlock(Chunks):
    def next_stop(self, arrival: Arrival, offer: Offer, now_s: float) -> int | None:
        manager = self._pools[arrival.size].scheduler.kv_cache_manager
        take = manager.allocate_slots
        manager.allocate_slots = lambda *request, num_lookahead_tokens, **options: take(
            *request, **options
        )
        try:
            return super().next_stop(arrival, offer, now_s)
        finally:
            del manager.allocate_slots


class _SetAsideEarly(Target):
    def _read_offer(self, arrival: Arrival, now_s: float) -> Offer | None:
        if arrival.phase is ArrivalPhase.EXPECTED:
            arrival.enter(ArrivalPhase.OFFERED)
        is_reserved = arrival.has_blocks or arrival.writers
        if not is_reserved and not self.chunks.reserve(arrival, arrival.usable_tokens, now_s):
            self._host.ask_blocks(arrival.size, self.chunks.missing_blocks(arrival))
        return super()._read_offer(arrival, now_s)


class _FreedEarly(Target):
    def _begin_pull(
        self, arrival: Arrival, offer: Offer, stop: int, limit_s: float | None
    ) -> float:
        if arrival.is_chunked(offer):
            self._incoming.release(arrival, stop)
        return super()._begin_pull(arrival, offer, stop, limit_s)


class _KeepsBlocks(Target):
    def _end_or_wait(self, arrival: Arrival, offer: Offer, now_s: float) -> None:
        pool = self._pools[arrival.size]
        pool.is_short = lambda: False  # type: ignore[method-assign]
        try:
            super()._end_or_wait(arrival, offer, now_s)
        finally:
            del pool.is_short


class _NotLookedAgain(Migrations):
    def pull_part(self, message: PullKV) -> None:
        blocks = self._source_blocks(message)
        self._source_blocks = lambda message: blocks  # type: ignore[method-assign]
        try:
            super().pull_part(message)
        finally:
            del self._source_blocks


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
    Fault.SET_ASIDE_EARLY: _SetAsideEarly,
    Fault.FREED_EARLY: _FreedEarly,
    Fault.KEEPS_BLOCKS: _KeepsBlocks,
}


def inject(fault: Fault | None, migrations: Migrations, table: Table) -> None:
    """Break migrations, if that is the fault."""
    migrations.source.__class__ = SOURCES.get(fault, Source)
    migrations.__class__ = _NotLookedAgain if fault is Fault.NOT_LOOKED_AGAIN else Migrations
    migrations.target._pull_part = migrations.pull_part
    migrations.target.__class__ = TARGETS.get(fault, Target)
    migrations.target.chunks.__class__ = _NoNextBlock if fault is Fault.NO_NEXT_BLOCK else Chunks
    migrations.incoming.__class__ = _NotLeft if fault is Fault.NOT_LEFT else IncomingRequests
    table.__class__ = _NeverRevoked if fault is Fault.NOT_REVOKED else Table
