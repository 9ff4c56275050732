"""The TaskPool: requests that wait. They are dispatched late, so a change of layout never strands a queue."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from flying_serving.controller.requests import Tracked
from flying_serving.errors import PoolFull

Kind = tuple[int | None, tuple[int, ...]]
FEW = 100
"""While more requests wait than this, one more is not reason enough to decide: the next tick does."""


class TaskPool:
    """Requests in the order (priority, arrival) among those that the same groups suit.

    Args:
        limit: most requests that may wait.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.prompt_tokens = 0
        self._waiting: dict[str, Tracked] = {}
        self._queues: dict[Kind, list[tuple[int, int, str]]] = {}
        self._deadlines: list[tuple[float, str]] = []
        self._urgent = 0
        self._gone = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Tracked]:
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

    @property
    def first(self) -> Tracked | None:
        """Whose turn it is."""
        heads = [queue[0] for queue in self._queues.values() if self._head(queue) is not None]
        return self._waiting[min(heads)[2]] if heads else None

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

    def add(self, tracked: Tracked) -> None:
        """Let a request wait."""
        wanted = tracked.wanted
        self._waiting[tracked.request_id] = tracked
        self.prompt_tokens += wanted.prompt_tokens
        self._urgent += wanted.urgent
        kind = (wanted.degree, tracked.sizes)
        heapq.heappush(self._queues.setdefault(kind, []), (wanted.priority, tracked.order, tracked.request_id))
        if wanted.deadline_s is not None and not tracked.admitted:
            heapq.heappush(self._deadlines, (tracked.arrived_s + wanted.deadline_s, tracked.request_id))

    def remove(self, request_id: str) -> Tracked | None:
        """Take a request out; None if it does not wait."""
        tracked = self._out(request_id)
        self._forget_gone()
        return tracked

    def _out(self, request_id: str) -> Tracked | None:
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
        for kind, queue in list(self._queues.items()):
            left = self._queues[kind] = [entry for entry in queue if entry[-1] in self._waiting]
            heapq.heapify(left)
            if not left:
                del self._queues[kind]

    def take(self, place: Callable[[Tracked], bool]) -> None:
        """Offer the first of every kind to `place` until it refuses one of that kind; those that it takes leave."""
        heads = [(queue[0], kind) for kind, queue in list(self._queues.items()) if self._head(queue) is not None]
        heapq.heapify(heads)
        while heads:
            (_, _, request_id), kind = heapq.heappop(heads)
            queue = self._queues[kind]
            if not place(self._waiting[request_id]):
                continue
            self._out(request_id)
            if self._head(queue) is not None:
                heapq.heappush(heads, (queue[0], kind))
            else:
                del self._queues[kind]
        self._forget_gone()

    def expired(self, now_s: float) -> list[str]:
        """Requests whose deadline has passed before any group had them; they still wait until `remove`."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, request_id = heapq.heappop(self._deadlines)
            tracked = self._waiting.get(request_id)
            if tracked is not None and not tracked.admitted:
                late.append(request_id)
        return late

    def _head(self, queue: list[tuple[int, int, str]]) -> str | None:
        while queue and queue[0][2] not in self._waiting:
            heapq.heappop(queue)
        return queue[0][2] if queue else None
