"""The layout for urgent requests: what they take from others has a price."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import satisfies
from flying_serving.policy.snapshot import Need, Snapshot
from flying_serving.policy.switching import next_end_s
from flying_serving.predict.work import weight
from harness.examples import examples
from tests.unit.policy.situations import situations
from tests.unit.policy.snapshots import BUSY, chosen, decide, load, snapshot

NARROW = Layout.uniform(4, 1)
WAITS = Need(2, urgent=True, reason="priority: 1 urgent requests", waiting=1)
RUNS = replace(WAITS, waiting=0)


def test_an_urgent_request_that_runs_takes_no_engines_from_others() -> None:
    """Under `priority` it always gets a wide group."""
    loads = {(n,): load(40) for n in range(4)}
    assert chosen("auto", snapshot(NARROW, BUSY, loads, [RUNS])) == NARROW
    assert satisfies(chosen("priority", snapshot(NARROW, BUSY, loads, [RUNS])), [RUNS])


@pytest.mark.parametrize(("left", "is_made"), [(2.0, False), (5000.0, True)])
def test_an_urgent_request_that_waits_gets_a_group_if_that_is_worth_it(
    left: float, is_made: bool
) -> None:
    """It is not where others end soon, and make room for it."""
    loads = {(n,): load(1, left) for n in range(4)}
    layout = chosen("auto", snapshot(NARROW, BUSY, loads, [WAITS]))
    assert satisfies(layout, [WAITS]) == is_made
    assert is_made or layout == NARROW


@settings(max_examples=examples(300))
@given(situation=situations())
def test_an_urgent_need_is_met_in_every_situation_where_waiting_costs_more(
    situation: tuple[Snapshot, Layout],
) -> None:
    """The switch at any price, of `priority`, is the one that has the price. It counts twice."""
    shot = replace(situation[0], needs=[WAITS])
    at_any_price = decide("priority", shot)
    if at_any_price is None:
        assert satisfies(shot.layout, [WAITS])
        return
    waiting_costs = weight(urgent=True) * WAITS.waiting * next_end_s(shot)
    decision = decide("auto", shot)
    if waiting_costs > 2 * at_any_price.cost:
        assert decision == replace(
            at_any_price, gain=waiting_costs, least_gain=2 * at_any_price.cost
        )
    else:
        assert decision is None or decision.reason.startswith("load")
