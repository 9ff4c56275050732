"""Requests age in an engine too: more urgent ones that come later do not hold one back, or preempt it, for ever."""

from __future__ import annotations

from collections import deque
from typing import Any

from flying_serving.vllm_hooks.priorities import promote


class Aging:
    """The requests of an engine's schedulers in the order in which they came there.

    Only those that come can starve others, so each arrival promotes those that came `aging_s` before it. Costs are
    amortised: one entry per request, looked at once.

    Args:
        aging_s: after how long in a scheduler a request goes before all that came later.
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._came: deque[tuple[float, Any, str]] = deque()

    def came(self, scheduler: Any, request_id: str, now_s: float) -> None:
        """A request comes to a scheduler."""
        while self._came and now_s - self._came[0][0] >= self._aging_s:
            promote(*self._came.popleft()[1:])
        self._came.append((now_s, scheduler, request_id))
