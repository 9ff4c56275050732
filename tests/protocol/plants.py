"""What can be broken on purpose: the exploration has to find each."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from flying_serving.engine.moves import Arrival, Moves
from flying_serving.engine.tickets import Move


class Plant(Enum):
    """What can be broken on purpose."""

    NOT_AT_ONCE = "a ticket gets its place in one inbox after the other"
    BY_ARRIVAL = "tickets are served as they arrive, and not in their places"
    GRANT_DROPPED = "grants of engine 1 get lost"
    COMMIT_DROPPED = "commits for engine 1 get lost"
    STEP_TWICE = "steps of two arrive twice at engine 1"
    ADDED_TWICE = "the client sends requests for groups twice"
    NOT_ADDED = "requests for engine 2 get lost"
    LET_GO_EARLY = "a leader lets the blocks of a retained request go before its KV is fetched"
    ADMITTED_EARLY = "a scheduler gets a request before its KV is there"
    OFFERED_EARLY = "a leader offers KV of a step that is still under way"
    STAYS = "a request that goes on elsewhere before it has come stays"
    NO_NEXT_BLOCK = "KV comes to blocks that leave no room for the next token"


class _LetGoEarly(Moves):
    def retain(self, request_ids: Iterable[str], now_s: float) -> None:
        before = set(self._retained)
        super().retain(request_ids, now_s)
        for name in set(self._retained) - before:
            retained = self._retained[name]
            self._led[retained.size].pool.unpin(retained.blocks)

    def _let_go(self, request_ids: Iterable[str]) -> None:
        for name in list(request_ids):
            self._retained.pop(name, None)


class _AdmittedEarly(Moves):
    def _prepare(self, arrival: Arrival, now_s: float) -> Move | None:
        move = super()._prepare(arrival, now_s)
        if move is not None and move.tokens:
            self._led[arrival.size].pool.arrived(arrival.request, move.tokens)
            self._admit(arrival.request, arrival.size)
        return move

    def _arrived(self, move: Move, tokens: int) -> None:
        if move.tokens:
            del self._coming[move.request_id]
        else:
            super()._arrived(move, tokens)


class _OfferedEarly(Moves):
    def retain(self, request_ids: Iterable[str], now_s: float) -> None:
        names = list(request_ids)
        here = [lane.scheduler.requests for lane in self._led.values()]
        computed = {n: requests[n].num_computed_tokens for requests in here for n in names if n in requests}
        super().retain(names, now_s)
        for name in computed.keys() & self._retained.keys():
            self._retained[name].tokens = computed[name]


class _Stays(Moves):
    def retain(self, request_ids: Iterable[str], now_s: float) -> None:
        waiting, left = self._waiting, {name: arrival.left for name, arrival in self._coming.items()}
        super().retain(request_ids, now_s)
        self._waiting = waiting
        for name, arrival in self._coming.items():
            arrival.left = left[name]


class _NoNextBlock(Moves):
    def _prepare(self, arrival: Arrival, now_s: float) -> Move | None:
        manager = self._led[arrival.size].scheduler.kv_cache_manager
        take = manager.allocate_slots
        manager.allocate_slots = lambda *request, num_lookahead_tokens, **options: take(*request, **options)
        try:
            return super()._prepare(arrival, now_s)
        finally:
            del manager.allocate_slots


MOVES: dict[Plant | None, type[Moves]] = {
    Plant.LET_GO_EARLY: _LetGoEarly,
    Plant.ADMITTED_EARLY: _AdmittedEarly,
    Plant.OFFERED_EARLY: _OfferedEarly,
    Plant.STAYS: _Stays,
    Plant.NO_NEXT_BLOCK: _NoNextBlock,
}
"""What is in place of Moves, by what is broken."""
