"""Faults that can be injected: the exploration has to find each."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from flying_serving.migration.messages import MigratingRequest
from flying_serving.migration.migrations import Migrations
from flying_serving.migration.source import Source
from flying_serving.migration.target import Arrival, Target


class Fault(Enum):
    """What is broken."""

    NOT_AT_ONCE = "a message gets its place in one inbox after the other"
    BY_ARRIVAL = "messages are served as they arrive, and not in their places"
    GRANT_DROPPED = "grants of engine 1 get lost"
    COMMIT_DROPPED = "commits for engine 1 get lost"
    STEP_TWICE = "steps of two arrive twice at engine 1"
    ADDED_TWICE = "the client sends requests for groups twice"
    NOT_ADDED = "requests for engine 2 get lost"
    RELEASED_EARLY = "a leader releases the blocks of a retained request before its KV is fetched"
    ADMITTED_EARLY = "a scheduler gets a request before its KV is there"
    OFFERED_EARLY = "a leader offers KV of a step that is still under way"
    NOT_LEFT = "a request that goes on elsewhere before it has arrived stays"
    NO_NEXT_BLOCK = "KV arrives in blocks that leave no room for the next token"


class _ReleasedEarly(Source):
    def retain(self, request_ids: Iterable[str], now_s: float) -> None:
        before = set(self.retained)
        super().retain(request_ids, now_s)
        for name in set(self.retained) - before:
            retained = self.retained[name]
            self._pools[retained.size].unpin(retained.blocks)

    def release(self, request_ids: Iterable[str]) -> None:
        for name in list(request_ids):
            self.retained.pop(name, None)


class _AdmittedEarly(Target):
    def prepare(self, arrival: Arrival, now_s: float) -> MigratingRequest | None:
        found = super().prepare(arrival, now_s)
        if found is not None and found.tokens:
            self._pools[arrival.size].arrived(arrival.request, found.tokens)
            self._admit(arrival.request, arrival.size)
        return found

    def arrived(self, migrating: MigratingRequest, tokens: int) -> Arrival:
        if migrating.tokens:
            return self.arriving.pop(migrating.request_id)
        return super().arrived(migrating, tokens)


class _OfferedEarly(Source):
    def retain(self, request_ids: Iterable[str], now_s: float) -> None:
        names = list(request_ids)
        here = [pool.scheduler.requests for pool in self._pools.values()]
        computed = {n: requests[n].num_computed_tokens for requests in here for n in names if n in requests}
        super().retain(names, now_s)
        for name in computed.keys() & self.retained.keys():
            self.retained[name].tokens = computed[name]


class _NotLeft(Target):
    def leave(self, request_ids: Iterable[str]) -> None:
        pass


class _NoNextBlock(Target):
    def prepare(self, arrival: Arrival, now_s: float) -> MigratingRequest | None:
        manager = self._pools[arrival.size].scheduler.kv_cache_manager
        take = manager.allocate_slots
        manager.allocate_slots = lambda *request, num_lookahead_tokens, **options: take(*request, **options)
        try:
            return super().prepare(arrival, now_s)
        finally:
            del manager.allocate_slots


SOURCES: dict[Fault | None, type[Source]] = {Fault.RELEASED_EARLY: _ReleasedEarly, Fault.OFFERED_EARLY: _OfferedEarly}
TARGETS: dict[Fault | None, type[Target]] = {
    Fault.ADMITTED_EARLY: _AdmittedEarly,
    Fault.NOT_LEFT: _NotLeft,
    Fault.NO_NEXT_BLOCK: _NoNextBlock,
}


def inject(fault: Fault | None, migrations: Migrations) -> None:
    """Break migrations, if that is the fault."""
    migrations.source.__class__ = SOURCES.get(fault, Source)
    migrations.target.__class__ = TARGETS.get(fault, Target)
