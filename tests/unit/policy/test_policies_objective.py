"""`--slo` and `--horizon-s`: what they make of decisions, in the direction that their texts say."""

from statistics import mean

import pytest

from flying_serving.layout.groups import Layout
from flying_serving.policy.snapshot import Snapshot
from flying_serving.predict.work import Objective, Work
from tests.unit.policy.costs import Costs, costs
from tests.unit.policy.simulated import arrivals, serve
from tests.unit.policy.snapshots import decide, load, snapshot

APART, TOGETHER = (Layout.uniform(2, size) for size in (1, 2))
SOONER: Costs = costs(fixed=1.5, rest=0.6)
"""Together the first token arrives sooner, and each one after it later."""
TARGETS_S = (float("inf"), 0.3)


def chosen(shot: Snapshot, objective: Objective) -> Layout:
    """Return the layout that `load` chooses."""
    decision = decide("load", shot, objective)
    return shot.layout if decision is None else decision.layout


@pytest.mark.parametrize("layout", [APART, TOGETHER])
@pytest.mark.parametrize("rate", [0.2, 0.5, 1.0])
def test_a_ttft_target_chooses_the_layout_that_meets_it(rate: float, layout: Layout) -> None:
    """Without one the layout with the least latency is chosen."""
    shot = snapshot(layout, Work(rate, 300.0, 60.0, 0.0), lanes=SOONER)
    assert [chosen(shot, Objective(20.0, ttft_s=target_s)).widest for target_s in TARGETS_S] == [
        1,
        2,
    ]


@pytest.mark.deep
def test_a_server_meets_a_ttft_target_more_often_if_it_has_one() -> None:
    """The same requests under the same controller; the whole answer takes longer then."""
    shares, whole_s = [], []
    for target_s in TARGETS_S:
        node = serve(
            "load", SOONER, arrivals(0.5, 300.0), objective=Objective(20.0, ttft_s=target_s)
        )
        shares.append(
            mean(r.first_token_s - r.arrival_s <= TARGETS_S[1] for r in node.outcome.ended)
        )
        whole_s.append(mean(r.end_s - r.arrival_s for r in node.outcome.ended))
    assert shares[1] > shares[0] + 0.1
    assert whole_s[1] > 1.1 * whole_s[0]


@pytest.mark.parametrize("running", [4, 8, 12])
def test_a_switch_that_pays_off_late_needs_a_long_horizon(running: int) -> None:
    """Requests that run stand in the way of more capacity: within a second too little is gained by
    it.
    """
    shot = snapshot(
        TOGETHER,
        Work(3.0, 300.0, 60.0, 0.0, running),
        {TOGETHER.groups[0]: load(running)},
        lanes=costs(fixed=0.7, rest=0.6),
    )
    found = [chosen(shot, Objective(horizon_s)).widest for horizon_s in (1.0, 5.0, 20.0, 60.0)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 2
    assert found[-1] == 1
