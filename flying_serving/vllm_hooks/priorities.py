"""vLLM's priority scheduling: the place of one request changed after it was given to a scheduler."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

FOREMOST = -(2**63) - 1
"""More urgent than any priority that a client can send."""


def promote(scheduler: Any, request_id: str) -> None:
    """Put a request before all that are not promoted; among these vLLM orders by arrival.

    It is scheduled before them and preempted after them. Nothing happens if it is over, or under another policy.
    """
    request = scheduler.requests.get(request_id)
    if request is None or scheduler.policy != SchedulingPolicy.PRIORITY:
        return
    if request.status == RequestStatus.RUNNING:
        request.priority = FOREMOST
        return
    for queue in (scheduler.waiting, scheduler.kv_holding_waiting):
        if request in queue:
            queue.remove_request(request)
            request.priority = FOREMOST
            queue.add_request(request)
