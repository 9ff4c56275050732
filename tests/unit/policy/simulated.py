"""A simulated server whose steps take what the tests say, under a random load."""

import random

from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import ClusterShape, Options
from flying_lab.sim.node import SimNode, System
from flying_lab.sim.requests import SimStep
from flying_lab.workload.model import Request
from flying_serving.controller.settings import Capacity, Limits, Settings
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.work import Objective
from tests.unit.policy.costs import Costs, measured
from tests.unit.policy.snapshots import OBJECTIVE

MAX_NUM_SEQS, MAX_BATCHED_TOKENS, BLOCKS = 64, 512, 626
MOST_EVENTS = 500_000


def arrivals(rate: float, seconds: float, seed: int = 1, begin_s: float = 0.0) -> list[Request]:
    """Return requests that come at random."""
    draw = random.Random(seed)
    requests: list[Request] = []
    now_s = begin_s + draw.expovariate(rate)
    while now_s < begin_s + seconds:
        requests.append(Request(len(requests), now_s, draw.randint(64, 512), draw.randint(16, 96)))
        now_s += draw.expovariate(rate)
    return requests


def serve(
    policy: str,
    lanes: Costs,
    requests: list[Request],
    engines: int = 2,
    objective: Objective = OBJECTIVE,
) -> SimNode:
    """Let a server run until everything is done; it was idle for some seconds when the first
    request came.
    """
    sizes = tuple(lanes)
    capacity = Capacity.of(sizes, BLOCKS, 32, 1, 8)
    chosen = Settings(
        engines, capacity, POLICIES[policy], Limits(MAX_NUM_SEQS, MAX_BATCHED_TOKENS), objective
    )
    shape = ClusterShape(
        engines,
        BLOCKS,
        {size: 32 * size for size in sizes},
        Options(MAX_NUM_SEQS, MAX_BATCHED_TOKENS),
    )

    def step_s(size: int, plan: SimStep) -> float:
        return lanes[size].step_s(plan.prefill_tokens, plan.sequences, plan.context_tokens)

    node = SimNode(System(policy, chosen, shape, step_s, measured(lanes)), Clock())
    node.start()
    for request in requests:
        node.clock.at(request.arrival_s, node.arrive, request)
    for _ in range(MOST_EVENTS):
        if not node.clock.step():
            assert len(node.outcome.ended) == len(requests)
            return node
    raise AssertionError("the server does not come to rest")
