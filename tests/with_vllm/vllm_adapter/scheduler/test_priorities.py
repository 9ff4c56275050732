"""Priorities: the order in vLLM's own queues after requests were promoted, and what that costs."""

from math import log2
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.request import Request, RequestStatus

from flying_serving.vllm_adapter.scheduler.priorities import FOREMOST, by_priority, promote


class Counted(Request):
    """A request that counts how often any of them is compared or looked up."""

    compared = 0
    looked_up = 0

    def __lt__(self, other: Request) -> bool:
        Counted.compared += 1
        return super().__lt__(other)

    def __hash__(self) -> int:
        Counted.looked_up += 1
        return id(self)


def made(name: str, priority: int, arrival_s: float) -> Request:
    """Return a request that waits."""
    return Counted(name, [1], SamplingParams(), None, arrival_time=arrival_s, priority=priority)


def scheduler_of(waiting: list[Request], holding: list[Request]) -> Any:
    """Return what is asked of vLLM's scheduler, with its queues; they are filled in this order."""
    queues = []
    for requests in (waiting, holding):
        queues.append(create_request_queue(SchedulingPolicy.PRIORITY))
        for request in requests:
            queues[-1].add_request(request)
    return SimpleNamespace(
        policy=SchedulingPolicy.PRIORITY,
        requests={request.request_id: request for request in [*waiting, *holding]},
        waiting=queues[0],
        kv_holding_waiting=queues[1],
    )


WAITING = st.lists(
    st.tuples(st.integers(-3, 3), st.integers(0, 5), st.booleans(), st.booleans()), max_size=40
)


@given(wishes=WAITING, split=st.integers(0, 40))
def test_promoted_requests_go_first_in_the_order_of_their_arrival(
    wishes: list[tuple[int, int, bool, bool]], split: int
) -> None:
    """In each queue, whatever is promoted at a time or one after the other; the others keep their
    order.
    """
    requests = [
        made(f"{i:02}", priority, float(at)) for i, (priority, at, _, _) in enumerate(wishes)
    ]
    order = {r.request_id: (r.priority, r.arrival_time, r.request_id) for r in requests}
    first = [f"{i:02}" for i, wish in enumerate(wishes) if wish[2]]
    then = [f"{i:02}" for i, wish in enumerate(wishes) if wish[3]]
    scheduler = scheduler_of(requests[:split], requests[split:])
    promote(scheduler, ["over", *first])
    promote(scheduler, then)
    for name in {*first, *then}:
        order[name] = (FOREMOST, *order[name][1:])
    for queue, had in (
        (scheduler.waiting, requests[:split]),
        (scheduler.kv_holding_waiting, requests[split:]),
    ):
        popped = [queue.pop_request().request_id for _ in range(len(queue))]
        assert popped == sorted([r.request_id for r in had], key=lambda name: order[name])


def test_one_that_runs_is_preempted_last() -> None:
    """It is in no queue; vLLM preempts by priority."""
    running = made("a", 2, 0.0)
    running.status = RequestStatus.RUNNING
    scheduler = scheduler_of([], [])
    scheduler.requests["a"] = running
    promote(scheduler, ["a"])
    assert running.priority == FOREMOST


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_queue_orders_by_priority_under_one_policy_of_vllm(policy: SchedulingPolicy) -> None:
    """One of vLLM's policies does."""
    assert by_priority(SimpleNamespace(policy=policy)) == (policy == SchedulingPolicy.PRIORITY)


@pytest.mark.deep
@pytest.mark.parametrize("count", [250, 1000])
@pytest.mark.parametrize("share", [1.0, 0.1, 0.0], ids=["all", "a tenth", "one"])
def test_promotion_costs_one_look_and_logarithmic_comparisons(count: int, share: float) -> None:
    """A look at each that waits, and comparisons with the logarithm of their number for each that
    is promoted.

    They came in the worst order: each one later is more urgent, so the oldest are last in the
    queue.
    """
    scheduler = scheduler_of([made(f"{i:04}", -i, float(i)) for i in range(count)], [])
    aged = [f"{i:04}" for i in range(max(1, int(share * count)))]
    Counted.compared = Counted.looked_up = 0
    promote(scheduler, aged)
    assert Counted.looked_up <= count + len(aged)
    assert Counted.compared <= len(aged) * (log2(count) + 1)
    assert scheduler.waiting.peek_request().request_id == "0000"
