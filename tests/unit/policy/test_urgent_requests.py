"""The layout for urgent requests: what they take from others has a price."""

from dataclasses import replace

import pytest

from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import satisfies
from flying_serving.policy.snapshot import Need
from tests.unit.policy.snapshots import BUSY, load, snapshot
from tests.unit.policy.test_policies import chosen

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
