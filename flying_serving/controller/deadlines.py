"""Deadlines of queues: how long a request may wait until some scheduler has it in a step."""

import heapq

from flying_serving.controller.requests import RequestState


class Deadlines:
    """Requests with a deadline that have not begun, in the task pool or in the queue of an engine.

    A request has begun when a scheduler has it in a step, as soon as the API server hears of that. One that has begun
    meets its deadline, whatever becomes of it later: it may be preempted, recalled or restored.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, RequestState] = {}
        self._heap: list[tuple[float, str]] = []
        self._gone = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, state: RequestState) -> None:
        """A request has arrived."""
        if state.spec.deadline_s is not None:
            self._waiting[state.request_id] = state
            heapq.heappush(self._heap, (state.arrived_s + state.spec.deadline_s, state.request_id))

    def drop(self, request_id: str) -> None:
        """A request has begun, or is over."""
        if self._waiting.pop(request_id, None) is not None:
            self._gone += 1
            self._forget_gone()

    def expired(self, now_s: float) -> list[RequestState]:
        """Requests whose deadline has passed; they have none from now on."""
        expired = []
        while self._heap and self._heap[0][0] <= now_s:
            state = self._waiting.pop(heapq.heappop(self._heap)[1], None)
            if state is not None:
                expired.append(state)
        return expired

    def _forget_gone(self) -> None:
        """The heap keeps entries of requests that have gone, but not more of them than of others."""
        if self._gone > len(self._waiting):
            self._gone = 0
            self._heap = sorted(entry for entry in self._heap if entry[1] in self._waiting)
