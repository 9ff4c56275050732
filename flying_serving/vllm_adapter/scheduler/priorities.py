"""vLLM's priority scheduling, with priorities that change while a scheduler has the requests."""

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

FOREMOST = -(2**63) - 1
"""More urgent than any priority that a client can send."""


def by_priority(scheduler: Any) -> bool:
    """Return whether a scheduler orders its requests by priority."""
    return bool(scheduler.policy == SchedulingPolicy.PRIORITY)


def promote(scheduler: Any, request_ids: Iterable[str]) -> None:
    """Put requests before all that are not promoted; among promoted ones vLLM orders by arrival.

    Promoted requests are scheduled first and preempted last. Requests that are over are skipped.
    The scheduler has to order by priority.

    Its queues are looked through once, and each request is compared with the logarithm of their
    length. vLLM's own ways to find and to remove a request sort all waiting ones, for each request.
    """
    waiting = set()
    for request_id in request_ids:
        request = scheduler.requests.get(request_id)
        if request is None:
            continue
        if request.status == RequestStatus.RUNNING:
            request.priority = FOREMOST
        else:
            waiting.add(request)
    if not waiting:
        return
    for queue in (scheduler.waiting, scheduler.kv_holding_waiting):
        heap = queue._heap
        # from the front: a request that rises moves others down at most to its old place, so the
        # places behind that stay right
        for index in [index for index, request in enumerate(heap) if request in waiting]:
            heap[index].priority = FOREMOST
            _rise(heap, index)


def _rise(heap: list[Any], index: int) -> None:
    """Move the entry at `index`, which has become smaller, towards the front of a heap, to its new
    place.
    """
    risen = heap[index]
    while index > 0:
        above = (index - 1) // 2
        if not risen < heap[above]:
            break
        heap[index] = heap[above]
        index = above
    heap[index] = risen
