"""The request-seconds that a layout loses: small gains that last add up, errors of both signs do
not.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import FORECAST_ERROR, least_gain
from flying_serving.policy.regret import HOLDS_S, Regret
from tests.unit.policy.snapshots import QUIET, snapshot

HORIZON_S = 20.0
APART, TOGETHER = Layout.uniform(2, 1), Layout.uniform(2, 2)


def lost_after(gains: list[float], step_s: float = 1.0) -> float:
    """Return the loss after these predicted gains, each of which holds for `step_s`."""
    regret = Regret(HORIZON_S)
    regret.until(APART, 0.0)
    for number, gain in enumerate(gains, start=1):
        regret.note(gain)
        lost = regret.until(APART, number * step_s)
    return lost


def test_a_gain_counts_by_the_share_of_the_horizon_in_which_it_is_not_made() -> None:
    assert lost_after([40.0] * 5) == pytest.approx(40.0 * 5 / HORIZON_S)


def test_a_time_in_which_the_layout_is_best_makes_up_for_a_loss() -> None:
    assert lost_after([40.0, 40.0, -40.0]) == pytest.approx(lost_after([40.0]))


def test_a_layout_has_no_credit_for_the_time_in_which_it_was_best() -> None:
    assert lost_after([-40.0] * 5 + [40.0]) == pytest.approx(lost_after([40.0]))


def test_another_layout_has_lost_nothing() -> None:
    regret = Regret(HORIZON_S)
    regret.until(APART, 0.0)
    regret.note(40.0)
    assert regret.until(TOGETHER, 5.0) == 0.0


def test_time_without_a_forecast_is_no_loss() -> None:
    """As of a switch that was dropped, or of a process that stood still."""
    assert lost_after([40.0], step_s=3600.0) == lost_after([40.0], step_s=HOLDS_S)


@given(
    stay=st.floats(1.0, 1000.0),
    share=st.floats(0.01, 1.0),
    cost=st.floats(0.0, 100.0),
    recent=st.integers(0, 5),
)
def test_a_worse_layout_is_left_before_it_loses_more_than_the_doubt(
    stay: float, share: float, cost: float, recent: int
) -> None:
    """The ski rental's bound: the loss before the switch is at most what the switch is dreaded to
    cost. A gain below twice the cost is never worth a switch.
    """
    gain, step_s = share * stay, 0.1
    if gain <= 2 * cost:
        return
    regret = Regret(HORIZON_S)
    regret.until(APART, 0.0)
    doubt = FORECAST_ERROR * stay * max(1, recent)
    now_s = lost = 0.0
    shot = snapshot(APART, QUIET, {})
    while gain <= least_gain(stay, cost, replace(shot, regret=lost, recent_switches=recent)):
        regret.note(gain)
        now_s += step_s
        lost = regret.until(APART, now_s)
        assert lost <= doubt + gain * step_s / HORIZON_S
