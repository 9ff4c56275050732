"""Virtual time, in seconds, for all parts of a simulation."""

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Virtual time and the events to come, in order."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[..., None], *args: Any) -> None:
        """Call an action at a time, or now if that has passed."""
        self._count += 1
        time_s = time_s if time_s > self.now_s else self.now_s  # the builtin max takes longer
        heapq.heappush(self._events, (time_s, self._count, action, args))

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Call an action after a delay."""
        self._count += 1
        heapq.heappush(self._events, (self.now_s + delay_s, self._count, action, args))

    def step(self) -> bool:
        """Call the next action; False if there is none."""
        if not self._events:
            return False
        self.now_s, _, action, args = heapq.heappop(self._events)
        action(*args)
        return True
