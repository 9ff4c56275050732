"""Nodes behind a router: all requests end, load is even, nothing is kept."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.nodes import Fleet, Tally
from flying_serving.sim import hardware, models
from flying_serving.sim.baselines import build
from flying_serving.sim.cluster import Options
from flying_serving.sim.machine import Modelled
from flying_serving.sim.node import System
from flying_serving.sim.requests import SimRequest
from flying_serving.sim.run import simulate
from flying_serving.workload.model import Request
from flying_serving.workload.synth import Poisson, synthesise


def system(policy: str = "auto") -> System:
    """A node of two devices."""
    machine = Modelled(models.load("llama-3-8b"), hardware.parse_devices("h200x2"))
    return build(policy, machine, 1, Options(keep_times=False))


def test_all_requests_end_and_nodes_share_them() -> None:
    requests = synthesise(Poisson(requests=300, rate_rps=40.0, output_tokens=(10, 60)), 0).requests
    ended: list[SimRequest] = []
    fleet = Fleet(system(), 4, ended.append)
    fleet.run(iter(requests))
    assert sorted(int(r.request_id) for r in ended) == list(range(300))
    assert (fleet.over, fleet.refused) == (300, 0)
    assert fleet.output_tokens == sum(r.output_tokens for r in requests)
    arrivals = [node.controller._arrivals for node in fleet.nodes]
    assert sum(arrivals) == 300 and min(arrivals) > 40
    assert all(not node.outcome.ended and not node.open for node in fleet.nodes)


def test_a_fleet_of_one_is_a_node() -> None:
    requests = synthesise(Poisson(requests=100, rate_rps=10.0), 0).requests
    fleet = Fleet(system(), 1)
    fleet.run(requests)
    alone = simulate(system(), requests).ended
    assert fleet.e2e.mean_s == pytest.approx(statistics.mean(r.end_s - r.arrival_s for r in alone))


def test_requests_are_read_one_ahead() -> None:
    seen = 0

    def stream():  # type: ignore[no-untyped-def]
        nonlocal seen
        for index in range(50):
            seen += 1
            yield Request(index, float(index), 100, 5)

    ahead = []
    fleet = Fleet(system("static-dp"), 2, lambda request: ahead.append(seen - int(request.request_id)))
    fleet.run(stream())
    assert max(ahead) <= 3


def test_what_no_node_can_hold_is_counted() -> None:
    fleet = Fleet(system("static-dp"), 2)
    fleet.run([Request(0, 0.0, 5_000_000, 5)])
    assert (fleet.refused, fleet.e2e.count) == (1, 0)


@given(st.lists(st.floats(1e-3, 1e4), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_quantiles_are_within_two_percent(values: list[float], share: float) -> None:
    tally = Tally()
    for value in values:
        tally.add(value)
    exact = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
    assert exact <= tally.quantile_s(share) * 1.0001 and tally.quantile_s(share) <= exact * 1.0201
    assert tally.mean_s == pytest.approx(statistics.mean(values))
