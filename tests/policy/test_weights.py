"""`--ttft-weight` and `--horizon-s`: what they make of decisions, in the direction that their texts say."""

from statistics import mean

import pytest

from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES
from flying_serving.policy.snapshot import Snapshot
from flying_serving.predict.work import Weights, Work
from tests.policy.costs import Costs, costs
from tests.policy.node import arrivals, serve
from tests.policy.snapshots import WEIGHTS, load, snapshot

APART, TOGETHER = (Layout.uniform(2, size) for size in (1, 2))
SOONER: Costs = costs(fixed=1.5, rest=0.6)
"""Together the first token comes sooner, and each one after it later."""


def chosen(shot: Snapshot, weights: Weights) -> Layout:
    """Return the layout that `load` wants."""
    decision = POLICIES["load"].decide(shot, weights)
    return shot.layout if decision is None else decision.layout


@pytest.mark.parametrize("layout", [APART, TOGETHER])
@pytest.mark.parametrize("rate", [0.2, 0.5, 1.0])
def test_the_more_a_first_token_counts_the_wider_the_groups(rate: float, layout: Layout) -> None:
    """From apart to together once, as the weight grows."""
    shot = snapshot(layout, Work(rate, 300.0, 60.0, 0.0), lanes=SOONER)
    found = [chosen(shot, Weights(20.0, weight)).widest for weight in (1.0, 5.0, 15.0, 50.0, 200.0)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, 2)


def test_a_server_has_sooner_first_tokens_the_more_they_count() -> None:
    """The same requests under the same controller; the whole answer takes longer then."""
    first_s, whole_s = [], []
    for weight in (1.0, 15.0):
        node = serve("load", SOONER, arrivals(0.5, 300.0), weights=Weights(20.0, weight))
        first_s.append(mean(r.first_token_s - r.arrival_s for r in node.outcome.ended))
        whole_s.append(mean(r.end_s - r.arrival_s for r in node.outcome.ended))
    assert first_s[1] < 0.9 * first_s[0]
    assert whole_s[1] > 1.1 * whole_s[0]


@pytest.mark.parametrize("running", [4, 8, 12])
def test_a_switch_that_pays_off_late_needs_a_long_horizon(running: int) -> None:
    """Requests that run stand in the way of more capacity: within a second too little is gained by it."""
    shot = snapshot(
        TOGETHER,
        Work(3.0, 300.0, 60.0, 0.0, running),
        {TOGETHER.groups[0]: load(running)},
        lanes=costs(fixed=0.7, rest=0.6),
    )
    found = [chosen(shot, Weights(horizon_s, WEIGHTS.ttft_weight)).widest for horizon_s in (1.0, 5.0, 20.0, 60.0)]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (2, 1)
