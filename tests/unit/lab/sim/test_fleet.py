"""Nodes behind a router: all requests end, each at the node that it was sent to, and one node is a
server alone.
"""

from dataclasses import replace

import pytest

from flying_lab.sim import hardware, models
from flying_lab.sim.catalog import build
from flying_lab.sim.cluster import Options
from flying_lab.sim.fleet import Fleet
from flying_lab.sim.machine import Modelled
from flying_lab.sim.node import System
from flying_lab.sim.requests import SimRequest
from flying_lab.sim.routing import RoundRobin, RouterName, make_router
from flying_lab.sim.run import simulate
from flying_lab.workload.model import Request
from flying_lab.workload.synth import Poisson, synthesise


def system(policy: str = "auto") -> System:
    """A node of two devices."""
    machine = Modelled(models.load("llama-3-8b"), hardware.parse_devices("h200x2"))
    return build(policy, machine, 1, Options(keep_times=False))


def test_all_requests_end_and_nodes_share_them() -> None:
    requests = synthesise(Poisson(requests=300, rate_rps=40.0, output_tokens=(10, 60)), 0).requests
    ended: list[SimRequest] = []
    fleet = Fleet(system(), 4, on_end=ended.append)
    fleet.run(iter(requests))
    assert sorted(int(r.request_id) for r in ended) == list(range(300))
    assert all(r.ended for r in ended) and fleet.over == 300
    assert fleet.routed == [node.controller._arrivals for node in fleet.nodes]
    assert sum(fleet.routed) == 300 and min(fleet.routed) > 40
    assert all(not node.outcome.ended and not node.open for node in fleet.nodes)


def test_requests_go_where_the_router_says() -> None:
    requests = synthesise(Poisson(requests=30, rate_rps=40.0, output_tokens=(10, 60)), 0).requests
    fleet = Fleet(system("stock-dp"), 3, RoundRobin())
    fleet.run(requests)
    there = [sorted(int(r.request_id) for r in node.outcome.ended) for node in fleet.nodes]
    assert there == [list(range(number, 30, 3)) for number in range(3)]
    outcome = fleet.outcome()
    assert len(outcome.ended) == 30 and outcome.layouts == []


@pytest.mark.parametrize("router", ["cache-aware", "least-load", "round-robin"])
def test_a_fleet_of_one_is_a_server_alone(router: RouterName) -> None:
    requests = synthesise(Poisson(requests=100, rate_rps=10.0), 0).requests
    fleet, alone = Fleet(system(), 1, make_router(router)), simulate(system(), requests)
    fleet.run(requests)
    outcome = fleet.outcome()
    assert [(r.request_id, r.end_s) for r in outcome.ended] == [
        (r.request_id, r.end_s) for r in alone.ended
    ]
    assert outcome.layouts == alone.layouts


def test_requests_are_read_one_ahead() -> None:
    seen = 0

    def stream():  # type: ignore[no-untyped-def]
        nonlocal seen
        for index in range(50):
            seen += 1
            yield Request(index, float(index), 100, 5)

    ahead = []
    fleet = Fleet(
        system("stock-dp"), 2, on_end=lambda request: ahead.append(seen - int(request.request_id))
    )
    fleet.run(stream())
    assert max(ahead) <= 3


def test_request_longer_than_every_node_is_refused() -> None:
    fleet = Fleet(system("stock-dp"), 2)
    fleet.run([Request(0, 0.0, 5_000_000, 5)])
    outcome = fleet.outcome()
    assert len(outcome.refused) == 1
    assert outcome.ended == []
    assert fleet.over == 1


@pytest.mark.parametrize(("router", "nodes_with_each"), [("cache-aware", 1), ("round-robin", 2)])
def test_a_router_that_knows_prefixes_has_more_hits(
    router: RouterName, nodes_with_each: int
) -> None:
    """Nine prompts with a part of their own are sent ten times each; a node has to compute what it
    was not sent yet.
    """
    requests = [
        Request(
            index, 3.0 * index, 1100, 5, hash_ids=(1000 + index % 9, 2000 + index % 9, 3000 + index)
        )
        for index in range(90)
    ]
    fleet = Fleet(replace(system("stock-tp"), hash_id_tokens=512), 2, make_router(router))
    fleet.run(requests)
    assert fleet.prefix_tokens() == (90 * 1100, (90 - 9 * nodes_with_each) * 1024)
