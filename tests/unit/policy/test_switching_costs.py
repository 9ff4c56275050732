"""What each mode of a switch costs, term by term: seconds and request-seconds computed by hand."""

from dataclasses import replace

import pytest

from flying_serving.layout.groups import Layout
from flying_serving.policy.snapshot import GroupLoad, Snapshot
from flying_serving.policy.switching import SwitchCandidate, costs, leaving
from flying_serving.predict.forecast import capacity, evaluate
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.steps import StepCost
from flying_serving.predict.work import Interference, Objective, Work
from tests.unit.policy.snapshots import PLAIN, snapshot

NARROW, WIDE = Layout.uniform(2, 1), Layout.uniform(2, 2)
LANES = {1: StepCost(0.02, 1e-3, 2e-3, 1e-6), 2: StepCost(0.011, 6e-4, 1e-3, 6e-7)}
WORK = Work(2.0, 300.0, 60.0, 3.0, running=4.0)
STEP_S = 0.02 + 4 * 2e-3 + 4 * 500 * 1e-6
"""Of four requests of 500 tokens in one engine."""
LAST_S = 50 * STEP_S
"""Until the one of them that ends last has its 50 tokens."""
PULL = MigrationCost(0.1, 2e-4)
STRAGGLER = GroupLoad(1, 90.0, 90.0, 3000.0)


def candidate(shot: Snapshot, layout: Layout, urgency: float = 1.0) -> SwitchCandidate:
    """Return the candidate of a switch to a layout."""
    return SwitchCandidate.of(
        shot, layout, leaving(shot, layout), Objective(20.0, urgency=urgency), PLAIN
    )


def joining(work: Work = WORK, urgency: float = 1.0) -> SwitchCandidate:
    """Return the switch in which an engine with four requests joins an idle one."""
    loads = {(0,): GroupLoad(4, 30.0, 50.0, 500.0)}
    return candidate(snapshot(NARROW, work, loads, (), LANES, {2: PULL}), WIDE, urgency)


def parting() -> SwitchCandidate:
    """Return the switch in which a group of two parts; of its five requests one is a straggler."""
    loads = {(0, 1): GroupLoad(5, 40.0, 90.0, 1000.0, by_least_size={2: STRAGGLER})}
    return candidate(snapshot(WIDE, WORK, loads, (), LANES, {2: PULL}), NARROW)


@pytest.mark.parametrize("urgency", [1.0, 7.0])
@pytest.mark.parametrize("rate", [0.0, 2.0])
def test_requests_that_arrive_during_a_wait_wait_for_half_of_it(
    rate: float, urgency: float
) -> None:
    """They arrive evenly. Those that are there wait for all of it."""
    cost = joining(replace(WORK, rate=rate), urgency).blocked()
    assert cost == pytest.approx(urgency * (3.0 * LAST_S + rate * LAST_S * LAST_S / 2))


def test_requests_that_migrate_pause_for_half_of_the_time() -> None:
    """One goes on after the other, evenly; new ones wait for all of it."""
    switch = joining()
    pause_s = 0.1 + 4 * 500 * 2e-4
    there = evaluate(
        WIDE, switch.snapshot.lane_figures, WORK, switch.objective, Interference(blocked_s=pause_s)
    )
    assert switch.cost_of_migrate() == pytest.approx(there + 4 * pause_s / 2)


def test_stragglers_do_not_pause_and_are_woven_after_the_pause() -> None:
    """Four of five requests migrate."""
    switch = parting()
    pause_s = 2 * 0.1 + (5 * 1000 - 3000) * 2e-4
    alone = SwitchCandidate.of(
        switch.snapshot, NARROW, {(0, 1): STRAGGLER}, switch.objective, PLAIN
    )
    assert switch.cost_of_migrate() == pytest.approx(alone.cost_of_weave(pause_s) + 4 * pause_s / 2)


@pytest.mark.parametrize("output_tokens", [60.0, 100.0])
def test_requests_of_an_idle_member_have_slow_steps_or_migrate(
    output_tokens: float,
) -> None:
    """In LAST_S an engine makes some 67 steps for a request of 300 tokens; a group is faster in
    each, and for the prompt.
    """
    switch = joining(replace(WORK, output_tokens=output_tokens))
    steps = LAST_S / (0.02 + 2e-3 + 300 * 1e-6)
    one_s = 0.009 + 300 * 4e-4 + min(steps, output_tokens) * 0.009
    if output_tokens > steps:
        one_s += 0.1 + 2e-4 * (300 + steps)
    found = costs(switch.snapshot, WIDE, switch.objective, PLAIN, urgent=False)["soft"]
    assert found == pytest.approx((3.0 + 2.0 * LAST_S) * one_s)


@pytest.mark.parametrize("token_s", [1e-4, 2e-3])
def test_until_weights_are_back_the_capacity_is_the_present_one(
    token_s: float,
) -> None:
    """If it has more."""
    lanes = LANES | {1: replace(LANES[1], prefill_token_s=token_s)}
    shot = replace(snapshot(WIDE, WORK, lanes=lanes), opens_in_s={(0, 1): 3.0})
    objective = Objective(20.0)
    more = capacity(NARROW, shot.lane_figures, WORK) / capacity(WIDE, shot.lane_figures, WORK) - 1
    assert (more > 0) == (token_s == 1e-4)
    closed = Interference(woven_s=3.0, overlap=max(0.0, more))
    at_once, later = (
        evaluate(NARROW, shot.lane_figures, WORK, objective, x) for x in (Interference(), closed)
    )
    found = costs(shot, NARROW, objective, PLAIN, urgent=False)
    assert found == {"weave": pytest.approx(later - at_once)}
    assert (found["weave"] > 0.0) == (more > 0)
