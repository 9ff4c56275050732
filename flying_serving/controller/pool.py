"""The TaskPool: requests that wait.

They are dispatched late, so a change of layout never strands a queue.
"""

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from flying_serving.controller.requests import RequestState
from flying_serving.controller.suspicion import Trial
from flying_serving.layout.groups import Group

Kind = tuple[int | None, tuple[int, ...], bool, Trial | None]

SOONER = 10
"""A request that is wider than all groups of the layout is overdue after this part of `aging_s`.

It needs room in several groups at once, which it would not find while others take whatever becomes
free.
"""


class TaskPool:
    """Waiting requests. Among requests that the same groups suit, the order is (priority, arrival).

    No request waits for ever. A request that arrived `aging_s` ago is *overdue*. Every second
    dispatch is offered to the oldest overdue request first, at any priority. With k older requests
    ahead of it, a request is among the next 2k + 2 that are dispatched.

    `needs_extra`: whether a request needs the extra room of a group. Others that need a group of
    the same size do not wait for that, nor for a request that may have killed engines.

    `urgent`: number of urgent requests that wait.

    `is_wider`: whether a request asks for more engines than any group of the layout has. It is
    overdue after a SOONER-th of `aging_s`.
    """

    def __init__(
        self,
        aging_s: float,
        needs_extra: Callable[[RequestState], bool] = lambda request: False,
        is_wider: Callable[[RequestState], bool] = lambda request: False,
    ) -> None:
        self.aging_s = aging_s
        self._needs_extra = needs_extra
        self._is_wider = is_wider
        self.prompt_tokens = 0
        self._waiting: dict[str, RequestState] = {}
        self._queues: dict[Kind, list[tuple[int, int, str]]] = {}
        self._ages: dict[Kind, list[tuple[int, str]]] = {}
        self._oldest_next = False
        self.urgent = 0
        self._gone = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._waiting.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def kv_group(self, request_id: str) -> Group | None:
        """Return the group with the KV of a request that waits; None if it does not wait, or has
        none.
        """
        request = self._waiting.get(request_id)
        return request.kv.group if request is not None and request.kv is not None else None

    def first(self, now_s: float) -> RequestState | None:
        """Return the request that is offered a group next."""
        return self._next(now_s, frozenset())[0]

    def first_of_each_kind(self) -> list[RequestState]:
        """Return the first request of each kind, by priority and arrival."""
        return [self._waiting[head[-1]] for head in self._heads(self._queues, ())]

    @property
    def oldest_s(self) -> float | None:
        """Time at which the request that is here longest has arrived at the server.

        A request that was recalled has run since.
        """
        return next((request.arrived_s for request in self._waiting.values()), None)

    def retry_after_s(self, now_s: float) -> int:
        """Return the whole seconds until about half of the waiting requests will have been
        dispatched.
        """
        return max(1, round((now_s - self.oldest_s) / 2)) if self.oldest_s is not None else 1

    def add(self, request: RequestState) -> None:
        """Let a request wait in the pool."""
        spec = request.spec
        self._waiting[request.request_id] = request
        self.prompt_tokens += spec.prompt_tokens
        if spec.urgent:
            self.urgent += 1
        self._enqueue(request)

    def _enqueue(self, request: RequestState) -> None:
        kind = self._kind(request)
        heapq.heappush(
            self._queues.setdefault(kind, []),
            (request.spec.priority, request.order, request.request_id),
        )
        heapq.heappush(self._ages.setdefault(kind, []), (request.order, request.request_id))

    def revise(self, change: Callable[[RequestState], object]) -> None:
        """Change each request that waits.

        It keeps its position among requests that the same groups suit.
        """
        for request in self._waiting.values():
            before = self._kind(request)
            change(request)
            if self._kind(request) != before:
                self._enqueue(request)
                self._gone += 1
        self._forget_gone()

    def remove(self, request_id: str) -> RequestState | None:
        """Take a request out; None if it does not wait."""
        request = self._take_out(request_id)
        self._forget_gone()
        return request

    def _take_out(self, request_id: str) -> RequestState | None:
        request = self._waiting.pop(request_id, None)
        if request is not None:
            self.prompt_tokens -= request.spec.prompt_tokens
            if request.spec.urgent:
                self.urgent -= 1
            self._gone += 1
        return request

    def _forget_gone(self) -> None:
        """Drop entries of requests that have gone, once there are more of them than of others."""
        if self._gone <= len(self._waiting):
            return
        self._gone = 0
        self._queues = self._of_waiting(self._queues)
        self._ages = self._of_waiting(self._ages)

    def _of_waiting(self, queues: dict[Kind, list[Any]]) -> dict[Kind, list[Any]]:
        """Return the queues without entries of requests that have gone; a sorted list is a heap."""
        left = {
            kind: sorted({entry for entry in queue if self._waits(entry, kind)})
            for kind, queue in queues.items()
        }
        return {kind: queue for kind, queue in left.items() if queue}

    def hand_out(self, dispatch: Callable[[RequestState], bool], now_s: float) -> None:
        """Offer the first request of every kind to `dispatch` until it refuses one of that kind.

        Requests that it takes leave the pool.
        """
        refused: set[Kind] = set()
        while True:
            request, by_age = self._next(now_s, refused)
            if request is None:
                break
            if dispatch(request):
                self._take_out(request.request_id)
                self._oldest_next = not by_age
            else:
                refused.add(self._kind(request))
        self._forget_gone()

    def _next(self, now_s: float, refused: Collection[Kind]) -> tuple[RequestState | None, bool]:
        """Return the request that is offered a group next, and whether because it is overdue."""
        if self._oldest_next:
            oldest = self._heads(self._ages, refused)
            overdue = [head for head in oldest if self.is_overdue(self._waiting[head[-1]], now_s)]
            if overdue:
                return self._waiting[min(overdue)[-1]], True
        heads = self._heads(self._queues, refused)
        return self._waiting[min(heads)[-1]] if heads else None, False

    def is_overdue(self, request: RequestState, now_s: float) -> bool:
        """Return whether a request has waited long enough to get every second dispatch."""
        aging_s = self.aging_s / SOONER if self._is_wider(request) else self.aging_s
        return now_s - request.arrived_s >= aging_s

    def _heads(
        self, queues: Mapping[Kind, list[Any]], refused: Collection[Kind]
    ) -> list[tuple[Any, ...]]:
        """Return the first entry of each kind that waits and is not refused."""
        heads = []
        for kind, queue in queues.items():
            while queue and not self._waits(queue[0], kind):
                heapq.heappop(queue)
            if queue and kind not in refused:
                heads.append(queue[0])
        return heads

    def _waits(self, entry: tuple[Any, ...], kind: Kind) -> bool:
        """Return whether an entry of a queue is of a request that waits and is of this kind.

        A request that has returned may be of another kind.
        """
        request = self._waiting.get(entry[-1])
        return request is not None and self._kind(request) == kind

    def _kind(self, request: RequestState) -> Kind:
        needs_extra = self._needs_extra(request)
        return request.spec.degree, request.sizes, needs_extra, request.suspicion.trial
