"""Tenants: the load per node is the same on average, bursts coincide as asked, prompts begin alike
within a tenant.
"""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.tenants import Tenants
from flying_lab.workload.model import Workload

SECONDS = 400.0
PHASES = {"low_s": 30.0, "burst_s": 10.0}


def per_second(tenants: Tenants, seed: int = 1) -> list[float]:
    """Requests per node in each second."""
    arrivals = [request.arrival_s for request in tenants.requests(seed)]
    return list(
        np.histogram(arrivals, bins=int(tenants.seconds), range=(0, tenants.seconds))[0]
        / tenants.nodes
    )


@given(st.integers(1, 3), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 3), st.integers(0, 5))
def test_requests_are_a_workload(
    nodes: int, together: float, shared_blocks: int, seed: int
) -> None:
    """In order, with one hash id for each block if prompts begin alike; the same each time."""
    tenants = Tenants(nodes, together, 20.0, shared_blocks)
    requests = tenants.requests(seed)
    assert Workload("tenants", seed, tuple(requests)).duration_s < 20.0
    assert requests == tenants.requests(seed) != tenants.requests(seed, replica=1)
    assert all(bool(request.hash_ids) == (shared_blocks > 0) for request in requests)


@pytest.mark.parametrize("together", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("nodes", [1, 16])
def test_the_load_per_node_is_the_same(nodes: int, together: float) -> None:
    assert np.mean(per_second(Tenants(nodes, together, SECONDS, **PHASES))) == pytest.approx(
        (3 * 3.5 + 20) / 4, rel=0.06
    )


def test_bursts_of_all_at_once_stay_however_many_nodes() -> None:
    quiet, burst = _phases(per_second(Tenants(32, 1.0, SECONDS, **PHASES)))
    assert np.mean(quiet) == pytest.approx(3.5, rel=0.05)
    assert np.mean(burst) == pytest.approx(20, rel=0.05)


def test_bursts_of_each_at_its_own_time_even_out() -> None:
    """With one node the load still varies by more than chance, with 32 by little."""
    one, many = (np.std(per_second(Tenants(nodes, 0.0, SECONDS, **PHASES))) for nodes in (1, 32))
    assert one > 3.5 > 1.2 > many


def test_half_of_the_tenants_burst_together() -> None:
    quiet, burst = _phases(per_second(Tenants(32, 0.5, SECONDS, **PHASES)))
    assert np.mean(burst) - np.mean(quiet) == pytest.approx((20 - 3.5) / 2, rel=0.1)


def _phases(rates: list[float]) -> tuple[list[float], list[float]]:
    """Of the common phases: the burst is in the middle of each 40 s."""
    quiet = [rate for second, rate in enumerate(rates) if not 15 <= second % 40 < 25]
    return quiet, [rate for second, rate in enumerate(rates) if 15 <= second % 40 < 25]


def test_prompts_of_a_tenant_begin_alike_and_of_no_other() -> None:
    found = defaultdict(set)
    for request in Tenants(2, 0.0, 60.0, shared_blocks=2).requests(1):
        if len(request.hash_ids) > 2:
            found[request.hash_ids[:2]].add(request.hash_ids[2:])
    assert len(found) == 8
    own = [one for rests in found.values() for rest in rests for one in rest]
    assert len(own) == len(set(own)) > 1000
