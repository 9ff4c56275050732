"""The TaskPool: requests that wait. They are dispatched late, so a change of layout never strands a queue."""

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from flying_serving.controller.requests import RequestState
from flying_serving.controller.suspicion import Trial
from flying_serving.layout.groups import Group

Kind = tuple[int | None, tuple[int, ...], bool, Trial | None]

SOONER = 10
"""A request that is wider than all groups of the layout is overdue after this part of the time of others: it needs room
in several groups at once, which it would not find while others take each place that becomes free."""


class TaskPool:
    """Requests in the order (priority, arrival) among those that the same groups suit, and none waits for ever.

    One that came `aging_s` ago is *overdue*. Every second place that groups have is offered to the oldest overdue
    request first, whatever the priorities: with k older ones ahead of it, a request gets one of the next 2k + 2 places.
    `needs_loan`: whether a group must lend its weights for a request; others that need a group of the same size do not
    wait for that, nor for one that may have killed engines. `is_wider`: whether it asks for more engines than any group
    of the layout has; it is overdue after a SOONER-th of `aging_s`.
    """

    def __init__(
        self,
        aging_s: float,
        needs_loan: Callable[[RequestState], bool] = lambda state: False,
        is_wider: Callable[[RequestState], bool] = lambda state: False,
    ) -> None:
        self.aging_s = aging_s
        self._needs_loan = needs_loan
        self._is_wider = is_wider
        self.prompt_tokens = 0
        self._waiting: dict[str, RequestState] = {}
        self._queues: dict[Kind, list[tuple[int, int, str]]] = {}
        self._ages: dict[Kind, list[tuple[int, str]]] = {}
        self._oldest_next = False
        self.urgent = 0
        """How many urgent requests wait."""
        self._gone = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._waiting.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def keeper(self, request_id: str) -> Group | None:
        """Which group keeps the KV of a request that waits; None if it does not wait, or has none."""
        state = self._waiting.get(request_id)
        return state.kv.group if state is not None and state.kv is not None else None

    def first(self, now_s: float) -> RequestState | None:
        """The request that is offered a place next."""
        return self._next(now_s, frozenset())[0]

    @property
    def oldest_s(self) -> float | None:
        """When the one that is here longest has arrived at the server; one that was recalled has run since."""
        return next((state.arrived_s for state in self._waiting.values()), None)

    def retry_after_s(self, now_s: float) -> int:
        """Whole seconds until about half of those that wait now will have been dispatched, by how long they wait."""
        return max(1, round((now_s - self.oldest_s) / 2)) if self.oldest_s is not None else 1

    def add(self, state: RequestState) -> None:
        """Let a request wait."""
        spec = state.spec
        self._waiting[state.request_id] = state
        self.prompt_tokens += spec.prompt_tokens
        if spec.urgent:
            self.urgent += 1
        self._queue(state)

    def _queue(self, state: RequestState) -> None:
        kind = self._kind(state)
        heapq.heappush(self._queues.setdefault(kind, []), (state.spec.priority, state.order, state.request_id))
        heapq.heappush(self._ages.setdefault(kind, []), (state.order, state.request_id))

    def revise(self, change: Callable[[RequestState], object]) -> None:
        """Change what is known of each request that waits; it keeps its place among those that the same groups suit."""
        for state in self._waiting.values():
            before = self._kind(state)
            change(state)
            if self._kind(state) != before:
                self._queue(state)
                self._gone += 1
        self._forget_gone()

    def remove(self, request_id: str) -> RequestState | None:
        """Take a request out; None if it does not wait."""
        state = self._out(request_id)
        self._forget_gone()
        return state

    def _out(self, request_id: str) -> RequestState | None:
        state = self._waiting.pop(request_id, None)
        if state is not None:
            self.prompt_tokens -= state.spec.prompt_tokens
            if state.spec.urgent:
                self.urgent -= 1
            self._gone += 1
        return state

    def _forget_gone(self) -> None:
        """Queues keep entries of requests that have gone until their turn comes, but not ever more."""
        if self._gone <= len(self._waiting):
            return
        self._gone = 0
        self._queues = self._of_waiting(self._queues)
        self._ages = self._of_waiting(self._ages)

    def _of_waiting(self, queues: dict[Kind, list[Any]]) -> dict[Kind, list[Any]]:
        """The queues without entries of others; a sorted list is a heap."""
        left = {kind: sorted({entry for entry in queue if self._waits(entry, kind)}) for kind, queue in queues.items()}
        return {kind: queue for kind, queue in left.items() if queue}

    def take(self, place: Callable[[RequestState], bool], now_s: float) -> None:
        """Offer the first of every kind to `place` until it refuses one of that kind; those that it takes leave."""
        refused: set[Kind] = set()
        while True:
            state, by_age = self._next(now_s, refused)
            if state is None:
                break
            if place(state):
                self._out(state.request_id)
                self._oldest_next = not by_age
            else:
                refused.add(self._kind(state))
        self._forget_gone()

    def _next(self, now_s: float, refused: Collection[Kind]) -> tuple[RequestState | None, bool]:
        """The request that is offered a place next, and whether because it is overdue."""
        if self._oldest_next:
            oldest = self._heads(self._ages, refused)
            overdue = [head for head in oldest if self.is_overdue(self._waiting[head[-1]], now_s)]
            if overdue:
                return self._waiting[min(overdue)[-1]], True
        heads = self._heads(self._queues, refused)
        return self._waiting[min(heads)[-1]] if heads else None, False

    def is_overdue(self, state: RequestState, now_s: float) -> bool:
        """Whether a request has waited so long that it gets every second place."""
        aging_s = self.aging_s / SOONER if self._is_wider(state) else self.aging_s
        return now_s - state.arrived_s >= aging_s

    def _heads(self, queues: Mapping[Kind, list[Any]], refused: Collection[Kind]) -> list[tuple[Any, ...]]:
        """The first entry of each kind that waits and is not refused."""
        heads = []
        for kind, queue in queues.items():
            while queue and not self._waits(queue[0], kind):
                heapq.heappop(queue)
            if queue and kind not in refused:
                heads.append(queue[0])
        return heads

    def _waits(self, entry: tuple[Any, ...], kind: Kind) -> bool:
        """Whether what a queue of this kind says of a request still holds: one that has come back may be of another."""
        state = self._waiting.get(entry[-1])
        return state is not None and self._kind(state) == kind

    def _kind(self, state: RequestState) -> Kind:
        trial = None if state.suspicion is None else state.suspicion.trial
        return state.spec.degree, state.sizes, self._needs_loan(state), trial
