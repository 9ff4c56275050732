"""Small simulated nodes for tests: linear step times, small pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import ClusterShape, Options
from flying_lab.sim.node import SimNode, System
from flying_lab.sim.requests import Chunk, SimStep
from flying_lab.workload.model import Request
from flying_serving.controller.settings import Capacity, Limits, Settings
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.steps import Step
from flying_serving.predict.work import Objective

BLOCK_TOKENS = 16
OPTIONS = Options(max_num_seqs=8, max_num_batched_tokens=128)


def step_time(size: int, step: SimStep) -> float:
    """A step of two engines is somewhat faster than one of one."""
    prefill, sequence = 0.0010 / size, 0.0008
    return 0.010 + 0.012 / size + prefill * step.prefill_tokens + sequence * step.sequences


def shape_of(
    engines: int, sizes: Sequence[int], blocks: int = 128, options: Options = OPTIONS, **other: Any
) -> ClusterShape:
    """A small node."""
    return ClusterShape(
        engines, blocks, {size: BLOCK_TOKENS * size for size in sizes}, options, **other
    )


def node_of(policy: str, engines: int = 4, blocks: int = 128, **other: Any) -> SimNode:
    """A node with the sizes 1, 2, ... that the policy uses."""
    return SimNode(system_of(policy, engines, blocks, **other), Clock())


def system_of(policy: str, engines: int = 4, blocks: int = 128, **other: Any) -> System:
    """What such nodes are made of."""
    chosen = POLICIES[policy]
    every = [size for size in (1, 2, 4, 8) if size <= engines]
    sizes = every if chosen.pinned_size is None else [chosen.pinned_size(every)]
    capacity = Capacity.of(sizes, blocks, BLOCK_TOKENS, 1, 8)
    limits = Limits(
        OPTIONS.max_num_seqs,
        OPTIONS.max_num_batched_tokens,
        capped=chosen.splits or chosen.pinned_size is None,
    )
    measured = [
        Step(size, step_time(size, SimStep([Chunk(tokens, 0)], count)), tokens, count, 0)
        for size in every
        for tokens, count in ((0, 1), (0, 8), (64, 0), (120, 0))
    ]
    settings = Settings(engines, capacity, chosen, limits, Objective(10.0))
    shape = shape_of(engines, sizes, blocks, **other)
    return System(policy, settings, shape, step_time, measured)


def run(node: SimNode, requests: Iterable[Request]) -> SimNode:
    """Serve all requests."""
    for request in requests:
        node.clock.at(request.arrival_s, node.arrive, request)
    events = 0
    while node.clock.step():
        events += 1
        assert events < 200_000, "the simulated node does not come to rest"
    return node


def check_over(node: SimNode, requests: Sequence[Request]) -> None:
    """Every request ended once with the tokens that it asked for, or was refused; no block is
    held.
    """
    outcome = node.outcome
    names = sorted(
        [r.request_id for r in outcome.ended] + [r.request_id for r, _ in outcome.refused]
    )
    assert names == sorted(str(r.index) for r in requests)
    asked = {str(r.index): r for r in requests}
    for request in outcome.ended:
        times = list(request.token_s or ())
        assert len(times) == request.tokens == asked[request.request_id].output_tokens
        assert times == sorted(times)
        assert times[0] == request.first_token_s
        assert times[-1] == request.end_s
        assert times[0] > asked[request.request_id].arrival_s
    node.controller.state.check_integrity()
    assert len(node.parts) == 0
    assert (
        node.open == {}
        and node.controller.state.running == 0
        and len(node.controller.state.pool) == 0
    )
    assert all(pool.free == pool.blocks for pool in node.cluster.pools)
    assert all(lane.requests == 0 for lane in node.cluster.lanes.values())
