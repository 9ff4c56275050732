"""Servers whose engines join and part: by the product's policy, in the ways of Gyges' baselines."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from flying_lab.sim import hardware, models
from flying_lab.sim.baselines.transforming import KINDS
from flying_lab.sim.catalog import build
from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Options
from flying_lab.sim.machine import Modelled
from flying_lab.sim.node import SimNode
from flying_lab.workload.model import Request
from flying_serving.errors import ConfigError
from flying_serving.policy.policies import POLICIES
from tests.unit.lab.sim.small_nodes import check_over, run

OPTIONS = Options(max_num_seqs=256, max_num_batched_tokens=2048)
LONG = 51_200
"""Tokens that no engine holds: each has KV memory for 30,600."""


def node_of(name: str = "gyges-paper", devices: str = "h20x8") -> SimNode:
    """Qwen2.5-32B on H20 with the activations that Gyges reports."""
    machine = Modelled(
        models.load("qwen2.5-32b"), hardware.parse_devices(devices), activations=14.3e9
    )
    node = SimNode(build(name, machine, 1, OPTIONS), Clock())
    node.start()
    return node


def joined(node: SimNode) -> int:
    """Return how many switches have made a group."""
    return sum(len(one.new.groups) < len(one.old.groups) for one in node.outcome.switches)


def mixed(count: int, seed: int) -> list[Request]:
    """Many short requests, some that need a group."""
    draw = random.Random(seed)
    arrivals = sorted(draw.uniform(0, count / 4) for _ in range(count))
    prompts = [LONG if draw.random() < 0.05 else draw.randrange(10, 3000) for _ in range(count)]
    return [Request(n, at_s, prompts[n], draw.randrange(1, 200)) for n, at_s in enumerate(arrivals)]


@pytest.mark.parametrize("name", KINDS)
def test_all_requests_are_served_and_all_blocks_return(name: str) -> None:
    """By the policy that the product has; a router that knows of no groups pays no price."""
    node = node_of(name)
    has_price = KINDS[name].placing is None
    assert has_price == (name not in ("gyges-round-robin", "gyges-least-load"))
    assert node.controller.settings.policy == replace(POLICIES["gyges"], has_price=has_price)
    requests = mixed(120, 7)
    run(node, requests)
    check_over(node, requests)
    assert len(node.outcome.ended) == 120
    assert joined(node) > 0
    assert all(pool.blocks >= node.shape.blocks - 1 for pool in node.cluster.pools)


@pytest.mark.parametrize("name", KINDS)
def test_engines_join_for_a_long_request_and_part_after_it(name: str) -> None:
    node = node_of(name)
    run(node, [Request(0, 0.0, LONG, 50)])
    assert joined(node) == 1
    assert len(node.outcome.switches) == 2
    assert node.controller.state.layout.widest == 1
    assert {pool.blocks for pool in node.cluster.pools} == {node.shape.blocks - 1}


@pytest.mark.parametrize(
    ("name", "count"), [("gyges-paper", 1), ("gyges-least-load", 2), ("gyges-round-robin", 2)]
)
def test_only_gyges_sends_a_second_long_request_to_the_group(name: str, count: int) -> None:
    """The paper's figure 13."""
    node = node_of(name)
    short = [Request(n, 0.01 * n, 1000, 20) for n in range(4)]
    run(node, [*short, Request(4, 1.0, LONG, 2000), Request(5, 20.0, LONG, 10)])
    assert joined(node) == count


def test_full_engines_do_not_join() -> None:
    node = node_of()
    run(node, [Request(n, 0.001 * n, 3000, 50) for n in range(100)])
    assert not node.outcome.switches


def test_one_engine_cannot_join_any() -> None:
    machine = Modelled(models.load("llama-3-8b"), hardware.parse_devices("h200x2"))
    with pytest.raises(ConfigError, match="--policy='gyges-paper': needs engines that can join"):
        build("gyges-paper", machine, 2, OPTIONS)
