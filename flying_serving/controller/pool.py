"""The TaskPool: requests that wait. They are dispatched late, so a change of layout never strands a queue."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from flying_serving.controller.requests import RequestState
from flying_serving.errors import PoolFull

Kind = tuple[int | None, tuple[int, ...]]
FEW = 100
"""While more requests wait than this, one more is not reason enough to decide: the next tick does."""


class TaskPool:
    """Requests in the order (priority, arrival) among those that the same groups suit, but none waits for ever.

    One that came `aging_s` ago is *overdue*. Every second place that groups have is offered to the oldest overdue
    request first, whatever the priorities: with k older ones ahead of it, a request gets one of the next 2k + 2 places.

    Args:
        limit: most requests that may wait.
        aging_s: after how long a request is overdue.
    """

    def __init__(self, limit: int, aging_s: float) -> None:
        self.limit = limit
        self.aging_s = aging_s
        self.prompt_tokens = 0
        self._waiting: dict[str, RequestState] = {}
        self._queues: dict[Kind, list[tuple[int, int, str]]] = {}
        self._ages: dict[Kind, list[tuple[int, str]]] = {}
        self._turn_of_age = False
        self._deadlines: list[tuple[float, str]] = []
        self._urgent = 0
        self._gone = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._waiting.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def few(self) -> bool:
        """Whether one more is reason enough to decide."""
        return len(self._waiting) <= FEW

    @property
    def urgent(self) -> int:
        """How many urgent requests wait."""
        return self._urgent

    def first(self, now_s: float) -> RequestState | None:
        """Whose turn it is."""
        return self._next(now_s, frozenset())[0]

    @property
    def oldest_s(self) -> float | None:
        """When the one that waits longest has arrived."""
        return next((tracked.arrived_s for tracked in self._waiting.values()), None)

    def retry_after_s(self, now_s: float) -> int:
        """Whole seconds until about half of those that wait now will have been dispatched, by how long they wait."""
        return max(1, round((now_s - self.oldest_s) / 2)) if self.oldest_s is not None else 1

    def check(self) -> None:
        """Raise PoolFull if no more requests may wait."""
        if len(self._waiting) >= self.limit:
            raise PoolFull(f"{self.limit} requests wait already (--max-waiting-requests)")

    def add(self, tracked: RequestState) -> None:
        """Let a request wait."""
        wanted = tracked.wanted
        self._waiting[tracked.request_id] = tracked
        self.prompt_tokens += wanted.prompt_tokens
        self._urgent += wanted.urgent
        kind = _kind(tracked)
        heapq.heappush(self._queues.setdefault(kind, []), (wanted.priority, tracked.order, tracked.request_id))
        heapq.heappush(self._ages.setdefault(kind, []), (tracked.order, tracked.request_id))
        if wanted.deadline_s is not None and not tracked.admitted:
            heapq.heappush(self._deadlines, (tracked.arrived_s + wanted.deadline_s, tracked.request_id))

    def remove(self, request_id: str) -> RequestState | None:
        """Take a request out; None if it does not wait."""
        tracked = self._out(request_id)
        self._forget_gone()
        return tracked

    def _out(self, request_id: str) -> RequestState | None:
        tracked = self._waiting.pop(request_id, None)
        if tracked is not None:
            self.prompt_tokens -= tracked.wanted.prompt_tokens
            self._urgent -= tracked.wanted.urgent
            self._gone += 1
        return tracked

    def _forget_gone(self) -> None:
        """Queues and deadlines keep entries of requests that have gone until their turn comes, but not ever more."""
        if self._gone <= len(self._waiting) + FEW:
            return
        self._gone = 0
        self._deadlines = [entry for entry in self._deadlines if entry[-1] in self._waiting]
        heapq.heapify(self._deadlines)
        self._queues = self._of_waiting(self._queues)
        self._ages = self._of_waiting(self._ages)

    def _of_waiting(self, queues: dict[Kind, list[Any]]) -> dict[Kind, list[Any]]:
        left = {kind: [entry for entry in queue if self._waits(entry, kind)] for kind, queue in queues.items()}
        for queue in left.values():
            heapq.heapify(queue)
        return {kind: queue for kind, queue in left.items() if queue}

    def take(self, place: Callable[[RequestState], bool], now_s: float) -> None:
        """Offer the first of every kind to `place` until it refuses one of that kind; those that it takes leave."""
        refused: set[Kind] = set()
        while True:
            tracked, by_age = self._next(now_s, refused)
            if tracked is None:
                break
            if place(tracked):
                self._out(tracked.request_id)
                self._turn_of_age = not by_age
            else:
                refused.add(_kind(tracked))
        self._forget_gone()

    def _next(self, now_s: float, refused: Collection[Kind]) -> tuple[RequestState | None, bool]:
        """Who is offered a place next, and whether for its age."""
        if self._turn_of_age:
            oldest = self._first_of(self._ages, refused)
            if oldest is not None and now_s - oldest.arrived_s >= self.aging_s:
                return oldest, True
        return self._first_of(self._queues, refused), False

    def _first_of(self, queues: Mapping[Kind, list[Any]], refused: Collection[Kind]) -> RequestState | None:
        heads = []
        for kind, queue in queues.items():
            while queue and not self._waits(queue[0], kind):
                heapq.heappop(queue)
            if queue and kind not in refused:
                heads.append(queue[0])
        return self._waiting[min(heads)[-1]] if heads else None

    def _waits(self, entry: tuple[Any, ...], kind: Kind) -> bool:
        """Whether what a queue of this kind says of a request still holds: one that has come back may be of another."""
        tracked = self._waiting.get(entry[-1])
        return tracked is not None and _kind(tracked) == kind

    def expired(self, now_s: float) -> list[str]:
        """Requests whose deadline has passed before any group had them; they still wait until `remove`."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, request_id = heapq.heappop(self._deadlines)
            tracked = self._waiting.get(request_id)
            if tracked is not None and not tracked.admitted:
                late.append(request_id)
        return late


def _kind(tracked: RequestState) -> Kind:
    return (tracked.wanted.degree, tracked.sizes)
