"""Weights that are lent in the simulator: by the production controller, in pieces between steps,
for KV room.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_lab.sim import hardware, models
from flying_lab.sim.clock import Clock
from flying_lab.sim.cluster import Options
from flying_lab.sim.loans import Loan
from flying_lab.sim.machine import Modelled
from flying_lab.sim.node import SimNode
from flying_lab.sim.requests import SimStep
from flying_lab.sim.system import flying
from flying_lab.workload.model import Request
from flying_serving.config import LOAN_SHARE
from flying_serving.errors import ConfigError
from flying_serving.policy.policies import POLICIES
from harness.examples import examples
from tests.unit.lab.sim.small_nodes import check_over, run, step_time, system_of

LOAN = Loan((0, 40, 80, 100), (0.001,) * 3, (0.004,) * 3)
"""A group of four holds 127 blocks of 64 tokens, and 100 more while it lends."""
HOLDS = 127 * 64


def lending_node(policy: str = "auto") -> SimNode:
    """Return a node whose steps fail if they are of a lane without its weights."""
    plain = system_of(policy)
    capacity = replace(plain.settings.capacity, lent_tokens=HOLDS + LOAN.blocks * 64)
    shape, chosen = replace(plain.shape, loan=LOAN), replace(plain.settings, capacity=capacity)
    node = SimNode(replace(plain, settings=chosen, shape=shape), Clock())

    def checked(size: int, step: SimStep) -> float:
        weights = [engine.weights for engine in node.cluster.engines]
        assert size == 4 or not any(one is not None and one.gone for one in weights)
        return step_time(size, step)

    node.cluster._step_time = checked
    return node


def check_whole(node: SimNode) -> None:
    """All weights are where the room says, which no request has any more."""
    for engine, pool in zip(node.cluster.engines, node.cluster.pools, strict=True):
        assert engine.weights is not None
        assert pool.blocks == node.shape.blocks - 1 + LOAN.room[engine.weights.gone]


def test_a_request_that_no_group_holds_is_served_with_lent_weights() -> None:
    requests = [Request(0, 1.0, HOLDS, 50), *(Request(n, 0.5 * n, 60, 20) for n in range(1, 30))]
    node = run(lending_node(), requests)
    check_over(node, requests)
    assert not node.outcome.refused and len(node.outcome.loans) == 1
    check_whole(node)


@pytest.mark.deep
@settings(max_examples=examples(25))
@given(
    rows=st.lists(
        st.tuples(
            st.floats(0, 20),
            st.integers(1, 200) | st.integers(HOLDS - 100, HOLDS + 4000),
            st.integers(1, 60),
            st.sampled_from([None, None, None, 1, 2]),
        ),
        min_size=1,
        max_size=25,
    ),
    policy=st.sampled_from(["auto", "context"]),
)
def test_all_requests_end_beside_those_that_need_a_loan(
    rows: list[tuple[float, int, int, int | None]], policy: str
) -> None:
    """Also requests for narrow groups in between."""
    ordered = sorted(rows, key=lambda row: row[0])
    requests = [
        Request(index, *row[:3], tp_degree=row[3] if row[1] <= 200 else None)
        for index, row in enumerate(ordered)
    ]
    node = run(lending_node(policy), requests)
    check_over(node, requests)
    assert not node.outcome.refused
    check_whole(node)


def test_pieces_take_their_share_of_the_time_while_requests_run() -> None:
    """Without any they follow each other."""
    node = lending_node("manual")
    engine = node.cluster.engines[0]
    assert engine.weights is not None
    ended: list[float] = []

    def note() -> None:
        ended.append(node.clock.now_s)

    engine.weights.begin(lends=True, done=note)
    while node.clock.step():
        pass
    assert ended == [pytest.approx(sum(LOAN.lend_s))]
    node.arrive(Request(0, 0.0, 10, 100, tp_degree=4))
    began_s = node.clock.now_s + 0.2
    node.clock.at(began_s, lambda: engine.weights and engine.weights.begin(lends=False, done=note))
    while node.clock.step():
        pass
    pieces_s = sum(LOAN.fetch_s[:2]) / LOAN_SHARE + LOAN.fetch_s[2]
    assert pieces_s <= ended[1] - began_s <= pieces_s + 4 * 0.03, "each may wait for a step"


def test_a_modelled_loan_is_all_that_is_divided() -> None:
    """Bytes over the link take most of its time; 52.9 GB per device in 157 ms is the design's own
    arithmetic.
    """
    machine = Modelled(models.load("llama-3-70b"), hardware.parse_devices("h200x8"), 0.8)
    loan = machine.loan(2, 4)
    assert loan.blocks == machine.lent_blocks(2, 4, "all")
    assert sum(loan.fetch_s) > 52.9e9 / machine.kind.hardware.spec.link_bandwidth.value
    assert sum(loan.lend_s) < sum(loan.fetch_s)


def test_only_a_group_of_all_engines_of_a_modelled_machine_lends() -> None:
    options = Options(lend_weights=True)
    machine = Modelled(models.load("llama-3-70b"), hardware.parse_devices("h200x8"), 0.8)
    system = flying(machine, 2, POLICIES["auto"], options)
    assert system.settings.capacity.lent_tokens == pytest.approx(2.37e6, rel=0.01)
    with pytest.raises(ConfigError, match="--lend-weights: needs a group of all"):
        flying(machine, 8, POLICIES["auto"], options)
