"""Layouts alike in request-seconds are ranked by their first tokens, and a policy that ranks them
so does not flap.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import FORECAST_ERROR, POLICIES, least_gain
from flying_serving.policy.snapshot import Decision, Snapshot
from flying_serving.predict.forecast import assess
from flying_serving.predict.steps import StepCost
from flying_serving.predict.work import Objective, Work
from tests.unit.policy.costs import ONE, Costs
from tests.unit.policy.snapshots import OBJECTIVE, decide, snapshot

APART, TOGETHER = Layout.uniform(2, 1), Layout.uniform(2, 2)
LOW = Work(0.3, 300.0, 60.0, 0.0)


def lanes(fixed: float) -> Costs:
    """Return lanes whose group computes prompts in half the time, and whose other steps take
    `fixed` times as long as one engine's.
    """
    group = StepCost(
        fixed * ONE.fixed_s, ONE.prefill_token_s / 2, ONE.sequence_s, ONE.context_token_s
    )
    return {1: ONE, 2: group}


def low_load(layout: Layout, fixed: float) -> Snapshot:
    """Return a server with a low load."""
    return snapshot(layout, LOW, lanes=lanes(fixed))


def decided(shot: Snapshot, objective: Objective = OBJECTIVE) -> Decision:
    """Return the comparison for load, whether or not the change is made."""
    decision = POLICIES["load"].decide(shot, objective)
    assert decision is not None
    return decision


def loss(shot: Snapshot) -> float:
    """Return the share of request-seconds that TOGETHER needs more than APART."""
    apart, together = (
        assess(layout, shot.lane_figures, shot.work, OBJECTIVE).request_seconds
        for layout in (APART, TOGETHER)
    )
    return together / apart - 1


def alike(loss_share: float) -> float:
    """Return the `fixed` of `lanes` with which TOGETHER loses `loss_share`, by bisection."""
    low, high = 0.5, 5.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if loss(low_load(APART, middle)) < loss_share else (low, middle)
    return low


def test_of_layouts_alike_in_request_seconds_the_first_tokens_decide() -> None:
    shot = low_load(APART, alike(0.01))
    decision = decide("load", shot)
    assert decision is not None
    assert decision.layout == TOGETHER


def test_layout_with_sooner_first_tokens_is_kept() -> None:
    assert decide("load", low_load(TOGETHER, alike(0.01))) is None


def test_of_layouts_not_alike_the_request_seconds_decide() -> None:
    fixed = alike(2.5 * FORECAST_ERROR)
    assert decide("load", low_load(APART, fixed)) is None
    decision = decide("load", low_load(TOGETHER, fixed))
    assert decision is not None
    assert decision.layout == APART


def test_objective_with_targets_ignores_the_order_of_first_tokens() -> None:
    objective = replace(OBJECTIVE, tpot_s=10.0)
    shot = low_load(APART, alike(0.01))
    plain = assess(APART, shot.lane_figures, shot.work, objective).request_seconds
    assert decided(shot, objective).stay == pytest.approx(plain)


def test_sooner_first_tokens_take_away_doubt_and_no_cost() -> None:
    shot = replace(low_load(APART, 1.0), promised=3.0)
    assert least_gain(50.0, 2.0, shot, FORECAST_ERROR) == pytest.approx(2 * 2.0 + 3.0)


@given(
    loss_share=st.floats(-0.3, 0.3),
    noise=st.lists(st.floats(0.97, 1.03), min_size=12, max_size=12),
)
def test_small_errors_of_the_work_cause_at_most_one_switch(
    loss_share: float, noise: list[float]
) -> None:
    """Without the promise that holds back a switch in the live server."""
    layout, switches = APART, 0
    fixed = alike(loss_share)
    for factor in noise:
        work = replace(LOW, rate=LOW.rate * factor, output_tokens=LOW.output_tokens * factor)
        decision = decide("load", replace(low_load(layout, fixed), work=work))
        if decision is not None:
            layout, switches = decision.layout, switches + 1
    assert switches <= 1
