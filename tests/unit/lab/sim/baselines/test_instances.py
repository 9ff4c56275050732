"""Gyges' scheduler: engines join for a request that none of them holds, keep everybody's KV, and
part again.
"""

from __future__ import annotations

import random

import pytest

from flying_lab.sim import hardware, models
from flying_lab.sim.baselines.instances import Transforms
from flying_lab.sim.baselines.transforming import KINDS
from flying_lab.sim.catalog import build
from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Options
from flying_lab.sim.machine import Modelled
from flying_lab.sim.node import SimNode
from flying_lab.sim.requests import SimRequest
from flying_lab.workload.model import Request
from flying_serving.errors import ConfigError
from tests.unit.lab.sim.nodes import check_over, run

OPTIONS = Options(max_num_seqs=256, max_num_batched_tokens=2048)
LONG = 51_200
"""Tokens that no engine holds: each has KV memory for 30,600."""


def node_of(name: str = "gyges", devices: str = "h20x8") -> tuple[SimNode, Transforms]:
    """Qwen2.5-32B on H20 with the activations that Gyges reports."""
    machine = Modelled(
        models.load("qwen2.5-32b"), hardware.parse_devices(devices), activations=14.3e9
    )
    node = SimNode(build(name, machine, 1, OPTIONS), Clock())
    node.start()
    assert isinstance(node.sender, Transforms)
    return node, node.sender


def mixed(count: int, seed: int) -> list[Request]:
    """Many short requests, some that need a group."""
    draw = random.Random(seed)
    arrivals = sorted(draw.uniform(0, count / 4) for _ in range(count))
    prompts = [LONG if draw.random() < 0.05 else draw.randrange(10, 3000) for _ in range(count)]
    return [Request(n, at_s, prompts[n], draw.randrange(1, 200)) for n, at_s in enumerate(arrivals)]


@pytest.mark.parametrize("name", KINDS)
def test_all_requests_are_served_and_all_blocks_return(name: str) -> None:
    node, transforms = node_of(name)
    requests = mixed(120, 7)
    run(node, requests)
    check_over(node, requests)
    assert len(node.outcome.ended) == 120
    assert transforms.log.joined > 0
    assert all(pool.blocks >= node.shape.blocks - 1 for pool in node.cluster.pools)
    assert all(not instance.requests and not instance.long for instance in transforms.instances)


def test_engines_join_for_a_long_request_and_part_after_it() -> None:
    node, transforms = node_of()
    run(node, [Request(0, 0.0, LONG, 50)])
    assert transforms.log.joined == 1
    assert transforms.log.parted == 1
    assert [instance.group for instance in transforms.instances] == [
        (engine,) for engine in range(8)
    ]
    assert {pool.blocks for pool in node.cluster.pools} == {node.shape.blocks - 1}


def test_requests_of_joining_engines_keep_their_kv() -> None:
    """Each prompt token is computed once; after a change a request goes on with a step of one
    token.
    """
    node, transforms = node_of()
    computed = []
    before = node.cluster._on_step
    node.cluster._on_step = lambda lane, took_s, step: (
        computed.extend(chunk.new_tokens for chunk in step.chunks),
        before(lane, took_s, step),
    )
    short = [Request(n, 0.01 * n, 1000, 300) for n in range(16)]
    run(node, [*short, Request(16, 3.0, LONG, 20)])
    assert transforms.log.joined == 1
    assert transforms.log.parted == 1
    assert all(request.preemptions == 0 for request in node.outcome.ended)
    assert sum(tokens for tokens in computed if tokens > 1) == 16 * 1000 + LONG


@pytest.mark.parametrize(
    ("name", "joined"),
    [("gyges", 1), ("gyges-by-length", 1), ("gyges-least-load", 2), ("gyges-round-robin", 2)],
)
def test_only_gyges_sends_a_second_long_request_to_the_group(name: str, joined: int) -> None:
    node, transforms = node_of(name)
    short = [Request(n, 0.01 * n, 1000, 20) for n in range(4)]
    run(node, [*short, Request(4, 1.0, LONG, 2000), Request(5, 20.0, LONG, 10)])
    assert transforms.log.joined == joined


@pytest.mark.parametrize(("name", "joins"), [("gyges", True), ("gyges-by-length", False)])
def test_full_engines_join_unless_only_lengths_count(name: str, joins: bool) -> None:
    node, transforms = node_of(name)
    run(node, [Request(n, 0.001 * n, 3000, 50) for n in range(100)])
    assert (transforms.log.joined > 0) == joins


def test_short_requests_avoid_a_group_that_is_to_part() -> None:
    node, transforms = node_of()
    run(node, [Request(0, 0.0, LONG, 10)])
    group = transforms._scale_up((0, 1, 2, 3))
    assert transforms._schedule_request(1000).group not in [(0,), (1,), (2,), (3,), group.group]
    assert transforms._schedule_request(LONG) is group


def test_engines_that_would_join_keep_room_for_a_long_request() -> None:
    """Without lent weights four engines hold 122,400 tokens: with 80,000 of them used they take no
    more.
    """
    node, transforms = node_of("loongserve")
    transforms._longest_tokens = LONG
    for engine in range(8):
        for n in range(10 if engine < 4 else 12):
            request = node_request(node, 100 * engine + n)
            transforms._add(transforms.instances[engine], request, 2000.0)
    transforms._update_reserve()
    assert transforms._reserve == (0, 1, 2, 3)
    assert transforms._schedule_request(2000).group[0] >= 4


def node_request(node: SimNode, index: int) -> SimRequest:
    """A request as the node makes it."""
    node.arrive(Request(index, 0.0, 1900, 100))
    return node.open[str(index)]


def test_one_engine_cannot_join_any() -> None:
    machine = Modelled(models.load("llama-3-8b"), hardware.parse_devices("h200x2"))
    with pytest.raises(ConfigError, match="--policy='gyges': needs engines that can join"):
        build("gyges", machine, 2, OPTIONS)
