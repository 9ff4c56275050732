"""Requests that come together: the `n` outputs of one prompt and the prompts of one batch are one
event.
"""

TOGETHER_S = 1.0
"""Requests of one name are one event as long as each comes within this time after the one before
it.
"""
MEMORY_EVENTS = 50
"""Events over which the number of requests in one is averaged."""


class Events:
    """Finds requests that begin an event, and how many requests an event has on average.

    `_events`, `_requests`: fading counts, in which one event of a single request counts at first.
    `_open`: the time of the last request of each event that may have more, in this order.
    """

    def __init__(self) -> None:
        self._events = 1.0
        self._requests = 1.0
        self._open: dict[str, float] = {}

    def begins(self, event: str | None, now_s: float) -> bool:
        """Return whether a request that comes now is the first of its event; None is an event of
        its own.
        """
        self._close_before(now_s - TOGETHER_S)
        goes_on = event is not None and self._open.pop(event, None) is not None
        if event is not None:
            self._open[event] = now_s
        if not goes_on:
            keep = 1.0 - 1.0 / MEMORY_EVENTS
            self._events = keep * self._events + 1.0
            self._requests = keep * self._requests
        self._requests += 1.0
        return not goes_on

    @property
    def mean_size(self) -> float:
        """Mean number of requests in one event, at least 1."""
        return self._requests / self._events

    def _close_before(self, time_s: float) -> None:
        while self._open and (first := next(iter(self._open.items())))[1] < time_s:
            del self._open[first[0]]
