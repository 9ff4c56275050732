"""Deadlines of queues: the longest wait of a request until some scheduler has it in a step."""

import heapq

from flying_serving.controller.requests import RequestState


class Deadlines:
    """Requests with a deadline that have not begun, in the task pool or in the queue of an engine.

    A request has begun when a scheduler has it in a step, as soon as the API server hears of that.
    A request that has begun meets its deadline for good: it may be preempted, recalled or restored
    later.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, RequestState] = {}
        self._heap: list[tuple[float, str]] = []
        self._gone = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: RequestState) -> None:
        """Note the deadline of a request that has arrived."""
        if request.spec.deadline_s is not None:
            self._waiting[request.request_id] = request
            heapq.heappush(
                self._heap, (request.arrived_s + request.spec.deadline_s, request.request_id)
            )

    def drop(self, request_id: str) -> None:
        """Drop the deadline of a request that has begun, or is over."""
        if self._waiting.pop(request_id, None) is not None:
            self._gone += 1
            self._forget_gone()

    def take_expired(self, now_s: float) -> list[RequestState]:
        """Take out the requests whose deadline has passed. They have none from now on."""
        expired = []
        while self._heap and self._heap[0][0] <= now_s:
            request = self._waiting.pop(heapq.heappop(self._heap)[1], None)
            if request is not None:
                expired.append(request)
        return expired

    def _forget_gone(self) -> None:
        """Keep at most as many entries of requests that have gone as of others."""
        if self._gone > len(self._waiting):
            self._gone = 0
            self._heap = sorted(entry for entry in self._heap if entry[1] in self._waiting)
