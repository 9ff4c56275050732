"""Requests that go on in another group with their KV, between engines (design section 5; docs/protocol.md).

The old group's leader *retains* a request: it no longer runs, and its blocks stay. The new group's leader, when the
client has sent it there, sets blocks aside for it and sends a ticket to all engines of both groups; in its turn they
exchange the KV, the old leader lets the blocks go and the new one gives the request to its scheduler. What is not there
to be fetched, or finds no room, is prefilled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import Request, RequestStatus

from flying_serving.engine.group import Member
from flying_serving.engine.tickets import Channel, MigrateKV, Move
from flying_serving.layout.groups import Group, aligned_group, cover
from flying_serving.vllm_adapter.blocks import SchedulerPool

RETAINED_S = 5.0
"""How long retained KV is held for the destination engine."""
PATIENCE_S = 1.0
"""How long a request waits for blocks to put its KV into, before it is prefilled again."""
HOLD_S = 0.5
"""How long engines make no step of their own for exchanges that the client has announced, or is about to.

What is announced meanwhile is not waited for longer: where layouts change so fast that what was announced has moved on
before it came, nothing would run any more."""
RETRY_S = 0.005


@dataclass(frozen=True)
class Led:
    """A lane that this engine leads: its scheduler, and the pool behind it."""

    scheduler: Any
    pool: SchedulerPool


@dataclass
class Retained:
    """A request that has left its lane: its tokens with KV, and the blocks of the lane that hold it."""

    size: int
    tokens: int
    blocks: list[int]
    since_s: float


@dataclass
class Arrival:
    """A request that is to come here with its KV; `old_id` is its id in the group `source`; `left`: it has gone on."""

    request: Request
    size: int
    source: Group
    old_id: str
    since_s: float
    start: int = 0
    aborted: bool = False
    left: bool = False


class Moves:
    """What comes to an engine and goes from it.

    Args:
        engine: this one.
        led: by group size, lane 1 among them.
        block_tokens: of every lane, by group size.
        members: this engine's part in each group.
        channel: to the other engines.
        rpc: calls a method of this engine's workers and returns what the first of them does.
        admit: gives a request to the scheduler of the lane of this size.
        lacks: told a size and how many blocks are missing there for what is to come.
    """

    def __init__(
        self,
        engine: int,
        led: Mapping[int, Led],
        block_tokens: Mapping[int, int],
        members: Mapping[int, Member],
        channel: Channel,
        rpc: Callable[..., Any],
        admit: Callable[[Request, int], None],
        lacks: Callable[[int, int], None],
    ) -> None:
        self._engine = engine
        self._led = led
        self._block_tokens = block_tokens
        self._members = members
        self._channel = channel
        self._rpc = rpc
        self._admit = admit
        self._lacks = lacks
        self._retained: dict[str, Retained] = {}
        self._waiting: list[Arrival] = []
        self._coming: dict[str, Arrival] = {}
        self._due_arrivals = 0
        self._due_tickets = 0
        self._word_until_s = 0.0
        self._due_until_s = 0.0
        self.moved = 0
        self.moved_tokens = 0
        self.prefilled_again = 0

    def __bool__(self) -> bool:
        """Whether something is on its way to this engine."""
        return bool(self._waiting or self._coming)

    def counts(self) -> dict[str, int]:
        """Requests that came with KV, tokens of it, and requests that had to be prefilled again; since the start."""
        return {"moved": self.moved, "moved_tokens": self.moved_tokens, "prefilled_again": self.prefilled_again}

    def await_word(self, now_s: float) -> None:
        """An order was answered after which requests move: the client says which as soon as all engines have.

        A step that began before would be made for nothing.
        """
        self._word_until_s = now_s + HOLD_S

    def announce(self, arrivals: int, tickets: int, now_s: float) -> None:
        """How many requests whose KV is elsewhere are about to come, and how many tickets with this engine bring KV.

        They are best served together: an engine that begins a step in between keeps all others waiting.
        """
        self._word_until_s = 0.0
        self._forget_what_is_late(now_s)
        if not (self._due_arrivals or self._due_tickets):
            self._due_until_s = now_s + HOLD_S
        self._due_arrivals += arrivals
        self._due_tickets += tickets

    def holds(self, now_s: float) -> bool:
        """Whether this engine should only serve tickets for now."""
        self._forget_what_is_late(now_s)
        return now_s < self._word_until_s or self._due_tickets > 0

    def _forget_what_is_late(self, now_s: float) -> None:
        if now_s >= self._due_until_s:
            self._due_arrivals = self._due_tickets = 0

    # ---- the old group's leader

    def retain(self, request_ids: Iterable[str], now_s: float) -> None:
        """Requests leave their lanes once they are here; their KV stays until fetched, or RETAINED_S are over."""
        ids = list(request_ids)
        self._waiting = [arrival for arrival in self._waiting if arrival.request.request_id not in ids]
        for arrival in self._coming.values():
            arrival.left = arrival.left or arrival.request.request_id in ids
        for request_id in ids:
            for size, lane in self._led.items():
                request = lane.scheduler.requests.get(request_id)
                if request is None:
                    continue
                # what a step under way computes may not be there yet
                tokens = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
                if tokens:
                    self._retained[request_id] = Retained(size, tokens, lane.pool.pin(request_id), now_s)
                lane.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def _let_go(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            retained = self._retained.pop(request_id, None)
            if retained is not None:
                self._led[retained.size].pool.unpin(retained.blocks)

    def _let_go_what_is_late(self, now_s: float) -> None:
        """Nobody fetches it, or requests of its lane would be preempted for want of blocks."""
        short = {p.size for p in self._retained.values() if self._led[p.size].pool.missing_for_running()}
        self._let_go([i for i, p in self._retained.items() if now_s - p.since_s > RETAINED_S or p.size in short])

    def _offer(self, ticket: MigrateKV, now_s: float) -> list[int]:
        """For each request of the ticket: how many tokens' KV is here, and its blocks, as many as `_most` says."""
        self.retain([move.request_id for move in ticket.moves], now_s)  # if the client's word is still on its way
        numbers = []
        for move in ticket.moves:
            retained, most = self._retained.get(move.request_id), self._most(ticket, move)
            blocks = retained.blocks[:most] if retained is not None else []
            numbers += [retained.tokens if retained is not None else 0, *blocks, *[0] * (most - len(blocks))]
        return numbers

    def _most(self, ticket: MigrateKV, move: Move) -> int:
        """How many blocks the old group has for the request, at most."""
        return -(-move.tokens // self._block_tokens[len(ticket.source)])

    # ---- the new group's leader

    def expect(self, request: Request, size: int, source: Group, old_id: str, now_s: float) -> None:
        """A request has come whose KV is in the group `source`."""
        self._due_arrivals = max(0, self._due_arrivals - 1)
        self._waiting.append(Arrival(request, size, source, old_id, now_s))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Requests are over, wherever they are on their way."""
        ids = set(request_ids)
        for arrival in self._coming.values():
            arrival.aborted = arrival.aborted or arrival.request.request_id in ids
        self._waiting = [arrival for arrival in self._waiting if arrival.request.request_id not in ids]

    def begin(self, now_s: float) -> None:
        """Order to bring the KV of those that have come, as far as there is room for it."""
        if self._retained:
            self._let_go_what_is_late(now_s)
        if not self._waiting or (self.holds(now_s) and self._due_arrivals):
            return
        tickets: dict[tuple[Group, int], list[Move]] = {}
        waiting, self._waiting, full = self._waiting, [], set()
        for arrival in waiting:
            move = None if arrival.size in full else self._prepare(arrival, now_s)
            if move is None:
                full.add(arrival.size)
                self._waiting.append(arrival)
            else:
                self._coming[arrival.old_id] = arrival
                tickets.setdefault((arrival.source, arrival.size), []).append(move)
        for (source, size), moves in tickets.items():
            target = aligned_group(self._engine, size)
            engines = cover(source, target, self._members)
            assert engines is not None  # the client sends nobody else
            self._channel.send(engines, MigrateKV(engines, source, target, moves))

    def retry_in_s(self, now_s: float) -> float | None:
        """Seconds until `begin` has something to do by itself; None if it has not."""
        if self._waiting:
            return RETRY_S
        return (
            max(0.0, min((p.since_s for p in self._retained.values()), default=0.0) + RETAINED_S - now_s)
            if self._retained
            else None
        )

    def _prepare(self, arrival: Arrival, now_s: float) -> Move | None:
        """Blocks for a request; None if there are too few. After PATIENCE_S it comes without its KV."""
        pool, request = self._led[arrival.size].pool, arrival.request
        tokens = request.num_tokens - 1
        room = pool.prepare(request, tokens)
        if room is not None:
            arrival.start, blocks = room
            return Move(arrival.old_id, arrival.start, tokens, blocks)
        if now_s - arrival.since_s > PATIENCE_S:
            return Move(arrival.old_id, 0, 0, [])
        self._lacks(arrival.size, pool.missing_for(request))
        return None

    def _arrived(self, move: Move, tokens: int) -> None:
        arrival = self._coming.pop(move.request_id)
        pool, request = self._led[arrival.size].pool, arrival.request
        if arrival.aborted or tokens <= move.start:
            pool.let_go(request)
        else:
            pool.arrived(request, tokens)
            self.moved += 1
            self.moved_tokens += tokens - move.start
        if not arrival.aborted:
            self.prefilled_again += tokens <= move.start < request.num_tokens - 1
            self._admit(request, arrival.size)

    # ---- every engine of the cover

    def serve(self, ticket: MigrateKV, now_s: float) -> None:
        """The ticket's turn has come: exchange the KV."""
        self._due_tickets = max(0, self._due_tickets - 1)
        engines, source, target, moves = ticket.group, ticket.source, ticket.target, ticket.moves
        most = [self._most(ticket, move) for move in moves]
        offer = self._offer(ticket, now_s) if self._engine == source[0] else None
        told = iter(self._rpc("tell_moved", engines, source[0], offer, len(moves) + sum(most)))
        there, runs = [], []
        for move, blocks in zip(moves, most, strict=True):
            there.append(min(next(told), move.tokens))
            runs.append(([next(told) for _ in range(blocks)], range(move.start, max(move.start, there[-1]))))
        count = sum(len(tokens) for _, tokens in runs)
        if count:
            mine = self._physical(source, runs)
            theirs = self._physical(target, [(m.blocks, r) for m, (_, r) in zip(moves, runs, strict=True)])
            self._rpc("move_kv", engines, source, target, mine, theirs, count)
        if self._engine == source[0]:
            self._let_go([move.request_id for move in moves])
        if self._engine == target[0]:
            come = [self._coming[move.request_id] for move in moves]
            for move, tokens in zip(moves, there, strict=True):
                self._arrived(move, tokens)
            self.retain([arrival.request.request_id for arrival in come if arrival.left], now_s)

    def _physical(self, group: Group, runs: list[tuple[list[int], range]]) -> list[tuple[list[int], range]] | None:
        """A group's blocks as this engine's own; None if it is no member."""
        if self._engine not in group:
            return None
        used = [(blocks, tokens) for blocks, tokens in runs if tokens]
        if len(group) == 1:
            return used
        return [(self._members[len(group)].lent.translate(blocks), tokens) for blocks, tokens in used]
