"""What keeps a policy from a switch: rates of arrivals that may be others, and past shortfalls."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES, least_gain
from flying_serving.predict.forecast import evaluate
from tests.unit.policy.snapshots import BUSY, OBJECTIVE, QUIET, SIZES, decide, snapshot

NARROW, PAIRS, WIDE = (Layout.uniform(4, size) for size in SIZES)


@pytest.mark.parametrize("rate_error", [0.0, 11.5])
def test_a_switch_has_to_gain_enough_at_every_likely_rate(rate_error: float) -> None:
    """A burst may be a chance cluster: then as few requests arrive as before."""
    shot = snapshot(WIDE, replace(BUSY, waiting=0.0, rate_error=rate_error))
    found = POLICIES["auto"].decide(shot, OBJECTIVE)
    assert found is not None
    assert found.gains_enough
    assert found.is_made == (rate_error == 0.0)
    assert found.unsure_at == (None if found.is_made else pytest.approx(12.0 - rate_error))


@given(
    rate=st.floats(0.05, 20.0), share=st.floats(0.0, 1.0), layout=st.sampled_from([NARROW, WIDE])
)
def test_what_is_done_at_an_uncertain_rate_is_done_at_likely_ones(
    rate: float, share: float, layout: Layout
) -> None:
    """To the same layout, each of them taken as certain, or to a better one."""
    work = replace(QUIET, rate=rate, rate_error=share * rate)
    made = decide("load", snapshot(layout, work))
    if made is None:
        return
    for likely in work.unlike:
        certain = replace(likely, rate_error=0.0)
        found = decide("load", snapshot(layout, certain))
        assert found is not None
        assert found.predicted[found.layout] <= found.predicted.get(made.layout, math.inf)


def test_a_shortfall_of_past_switches_makes_the_next_less_likely() -> None:
    """Of the same size; the prediction for the present layout is as before."""
    plain, doubted, other = (
        POLICIES["load"].decide(replace(snapshot(WIDE, BUSY), shortfalls=shares), OBJECTIVE)
        for shares in ({}, {1: 0.9, 2: 0.9}, {4: 0.9})
    )
    assert plain is not None and doubted is not None and other is not None
    assert plain.is_made and plain == other
    assert not doubted.is_made
    assert doubted.stay == plain.stay
    assert doubted.gain == pytest.approx(
        plain.stay - min(doubted.predicted[layout] for layout in (NARROW, PAIRS))
    )


@pytest.mark.parametrize("promised", [0.0, 1e6])
def test_a_decision_shows_what_was_compared_if_the_layout_stays(promised: float) -> None:
    """The prediction for each layout, the gain of the best one, what it had to exceed, and why."""
    shot = replace(snapshot(WIDE, BUSY), promised=promised)
    found = POLICIES["auto"].decide(shot, OBJECTIVE)
    assert found is not None
    assert found.is_made == (promised == 0.0)
    stay = evaluate(WIDE, shot.lane_figures, shot.work, OBJECTIVE)
    assert found.predicted[WIDE] == found.stay
    assert found.stay >= stay
    assert found.layout == min(found.predicted, key=found.predicted.__getitem__) == NARROW
    assert found.gain == found.predicted[WIDE] - found.predicted[NARROW]
    assert found.promised == promised
    assert found.least_gain is not None
    in_doubt = least_gain(found.predicted[WIDE], found.cost, shot)
    assert promised + 2 * found.cost <= found.least_gain <= in_doubt
    assert (found.mode == "") == (not found.considered) == (promised > 0.0)
