"""Requests age in an engine too: more urgent ones that come later do not hold one back, or preempt
it, for ever.
"""

from collections import defaultdict, deque
from typing import Any

from flying_serving.vllm_adapter.priorities import by_priority, promote


class Aging:
    """The requests of an engine's schedulers that have not aged yet, in the order in which they
    came there.

    Only those that come can starve others, so each arrival promotes those that came `aging_s`
    before it: they go before all that came later. Costs are amortised: one entry per request, which
    is promoted once. At most as many entries are of requests that are over as of others. A
    scheduler that does not order by priority starves no request, so none of its requests are noted.
    """

    def __init__(self, aging_s: float) -> None:
        self._aging_s = aging_s
        self._arrivals: defaultdict[Any, deque[tuple[float, str]]] = defaultdict(deque)

    def arrived(self, scheduler: Any, request_id: str, now_s: float) -> None:
        """A request, or more of the prompt of one that is there, comes to a scheduler: call this
        before it has it.
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
