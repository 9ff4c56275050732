"""Aging of requests in an engine: later arrivals that are more urgent do not hold a request back,
or preempt it, for ever.
"""

from collections import defaultdict, deque
from typing import Any

from flying_serving.vllm_adapter.scheduler.priorities import by_priority, promote


class Aging:
    """The requests of an engine's schedulers that have not aged yet, in order of arrival.

    Only later arrivals can starve a request, so each arrival promotes the requests that came
    `aging_s` before it: they go before all later arrivals. Costs are amortised: one entry per
    request, which is promoted once. Entries of ended requests are dropped when the entries
    outnumber the scheduler's requests two to one. A scheduler that does not order by priority
    starves no request, so none of its requests are noted.
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._arrivals: defaultdict[Any, deque[tuple[float, str]]] = defaultdict(deque)

    def arrived(self, scheduler: Any, request_id: str, now_s: float) -> None:
        """Note that a request, or more of its prompt, comes to a scheduler; call this before the
        scheduler has it.
        """
        if not by_priority(scheduler):
            return
        arrivals = self._arrivals[scheduler]
        aged = []
        while arrivals and now_s - arrivals[0][0] >= self._aging_s:
            aged.append(arrivals.popleft()[1])
        promote(scheduler, aged)
        if len(arrivals) > 2 * len(scheduler.requests):
            present = [entry for entry in arrivals if entry[1] in scheduler.requests]
            arrivals.clear()
            arrivals.extend(present)
        if request_id not in scheduler.requests:
            arrivals.append((now_s, request_id))
