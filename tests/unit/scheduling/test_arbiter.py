"""LaneArbiter: the weave over time. No lane starves, runs out of turn, or waits with work."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.layout.groups import Group, Layout
from flying_serving.scheduling.arbiter import HOLD_OLDER_S, HOLD_S, LaneArbiter, StepLane, Wait
from harness.examples import examples
from tests.unit.scheduling.arbitrated import EVENLY_S, GROUPS, ORDER_S, PRESENT, node, runs, steps
from tests.unit.scheduling.virtual_node import TICK_S, VirtualNode

# ---- nobody starves


@settings(max_examples=examples(60), deadline=None)
@given(
    present=st.sampled_from(PRESENT),
    busy=st.sets(st.sampled_from(GROUPS), min_size=1),
    hard=st.booleans(),
    k=st.sampled_from([1, 2, 4, 8, 1000]),
    max_pause_s=st.sampled_from([0.001, 0.03, 0.06, 0.2, 1.0]),
    slow=st.dictionaries(st.sampled_from(GROUPS), st.sampled_from([0.01, 0.05, 0.1])),
    seed=st.integers(0, 1000),
)
def test_every_lane_with_work_gets_a_step_in_time(
    present: list[int],
    busy: set[Group],
    hard: bool,
    k: int,
    max_pause_s: float,
    slow: dict[Group, float],
    seed: int,
) -> None:
    """Four engines, any layout, any lanes with work without end: no lane goes without for longer
    than a pause and a few steps of the others; also where pauses are shorter than steps, and other
    leaders' steps come in between.
    """
    chance = random.Random(seed)
    arbiters = [LaneArbiter(k, max_pause_s) for _ in range(4)]
    for one, size in zip(arbiters, present, strict=True):
        one.switch(size, hard=hard, weave_steps=k, now_s=0.0)
    engines = VirtualNode(
        arbiters,
        busy,
        lambda group: slow.get(group, 0.02) * chance.uniform(0.8, 1.2),
        lambda: chance.uniform(0.0001, 0.002),
    )
    longest = 0.12
    end = 3 * (max_pause_s + 13 * longest)
    engines.run_until(end)
    for group in busy:
        ends = [0.0, *(ended for _, ended, _ in steps(engines, group[0], len(group))), end]
        worst = max(later - earlier for earlier, later in pairwise(ends))
        assert worst <= max_pause_s + 13 * longest, (group, worst)


@settings(max_examples=examples(30), deadline=None)
@given(
    phases=st.lists(
        st.tuples(
            st.sampled_from(PRESENT),
            st.sets(st.sampled_from(GROUPS)),
            st.booleans(),
            st.integers(1, 3),
        ),
        min_size=2,
        max_size=5,
    ),
    always=st.sampled_from(GROUPS),
    seed=st.integers(0, 1000),
)
def test_busy_lane_is_not_starved_by_switches(
    phases: list[tuple[list[int], set[Group], bool, int]], always: Group, seed: int
) -> None:
    """One lane has work all the time, others come and go, and layouts change at any moment."""
    chance = random.Random(seed)
    arbiters = [LaneArbiter(1, 0.1) for _ in range(4)]
    engines = VirtualNode(
        arbiters,
        {always},
        lambda group: chance.uniform(0.005, 0.05),
        lambda: chance.uniform(0.0001, 0.002),
    )
    end = 0.0
    for present, busy, hard, k in phases:
        engines.busy = busy | {always}
        for engine, size in enumerate(present):
            arbiters[engine].switch(size, hard=hard, weave_steps=k, now_s=engines.now)
            engines.look_again(engine)
        end += chance.uniform(0.01, 2.0)
        engines.run_until(end)
    ends = [0.0, *(ended for _, ended, _ in steps(engines, always[0], len(always))), end]
    assert max(later - earlier for earlier, later in pairwise(ends)) <= 0.1 + 16 * 0.05


def test_a_third_lanes_steps_do_not_hold_up_the_count() -> None:
    """Engine 2: lane 1 is present and busy, steps of all four come from engine 0, and {2,3} drains,
    four to one.

    Each step of the four starts the count of present steps anew, so that it never comes to four.
    """
    engines = node([1, 1, 1, 1], {(2,), (2, 3), (0, 1, 2, 3)}, k=4, max_pause_s=0.5)
    engines.run_until(10.0)
    assert len(steps(engines, 2, 2)) >= 10.0 / (0.5 + 4 * EVENLY_S) - 1
    assert len(steps(engines, 2, 1)) > 100


def test_pauses_shorter_than_steps_do_not_starve_the_present_lane() -> None:
    """Engine 0: lane 1 is present, and two older lanes are late again as soon as the other has
    run.
    """
    for hard in (True, False):
        engines = node(
            [1, 1, 1, 1], {(0,), (0, 1), (0, 1, 2, 3)}, hard=hard, k=4, max_pause_s=0.001
        )
        engines.run_until(10.0)
        counts = [len(steps(engines, 0, size)) for size in (1, 2, 4)]
        assert min(counts) > 10.0 / EVENLY_S / 5, counts


# ---- k to one


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_a_present_group_and_an_older_lane_of_one_engine(k: int) -> None:
    """On the leader and on a member: k steps of the group, one of lane 1, and so on."""
    engines = node([2, 2], {(0, 1), (0,), (1,)}, k=k)
    engines.run_until(5.0)
    for engine in (0, 1):
        assert set(runs(engines, engine)) == {(2, k), (1, 1)}
        assert len(runs(engines, engine)) > 20


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_a_present_lane_of_one_engine_and_an_older_group(k: int) -> None:
    """On the leader, whose steps decide; the member runs what is planned."""
    engines = node([1, 1], {(0, 1), (0,), (1,)}, k=k)
    engines.run_until(5.0)
    assert set(runs(engines, 0)) == {(1, k), (2, 1)}
    assert {size for size, _ in runs(engines, 1)} == {1, 2}
    assert len(steps(engines, 1, 2)) in range(
        len(steps(engines, 0, 2)) - 1, len(steps(engines, 0, 2)) + 2
    )


@pytest.mark.parametrize(("step_s", "in_a_row"), [(0.2, 10), (0.02, 1), (0.005, 1)])
def test_an_older_lane_of_short_steps_makes_several(step_s: float, in_a_row: int) -> None:
    """It gets the time of one step of the present lane: coming together costs the group more than
    stepping.
    """
    engines = node(
        [1, 1], {(0, 1), (0,), (1,)}, step_s=lambda group: 0.02 if len(group) == 2 else step_s
    )
    engines.run_until(20.0)
    assert {count for size, count in runs(engines, 0) if size == 2} <= {
        in_a_row,
        max(1, in_a_row - 1),
    }
    assert len(steps(engines, 0, 2)) > 20 / (step_s + 0.02) / 2


def test_members_keep_still_while_an_older_groups_turn_goes_on() -> None:
    """Its steps follow each other at once, so that engines wait only for as long as a step of
    theirs took.
    """
    engines = node(
        [1, 1],
        {(0, 1), (0,), (1,)},
        step_s=lambda group: {2: 0.02, 1: (0.2, 0.1)[group[0]]}[len(group)],
    )
    engines.run_until(20.0)
    for engine, longest_s in ((0, 0.2), (1, 0.1)):
        ends = [ended for _, ended, _ in steps(engines, engine, 1)]
        assert (
            max(after - before for before, after in pairwise(ends)) < 0.2 + 0.1 + longest_s + 0.02
        )
    for (size, began), (after, ended) in pairwise((step[2], step[0]) for step in steps(engines, 1)):
        assert (size, after) != (2, 2) or ended - began < 0.02 + HOLD_OLDER_S


def test_an_older_group_goes_on_only_if_its_members_were_told() -> None:
    """Its step was shorter than the one before, so there is time for another; but the members have
    gone on.
    """
    ready = {1: True, 2: True}
    for before_s, told in ((0.02, True), (0.1, False)):
        arbiters = LaneArbiter(1, 10.0)
        arbiters.switch(1, hard=False, weave_steps=1, now_s=0.0)
        arbiters.ran(2, 0.0, more=False, leads=True, took_s=before_s)
        arbiters.ran(1, 0.1, more=True, leads=True, took_s=0.1)
        assert arbiters.announce(2) is told
        arbiters.ran(2, 0.12, more=told, leads=True, took_s=0.02)
        assert arbiters.choose(0.12, ready, message=False) == StepLane(2 if told else 1)


def test_older_lane_pays_for_waits_after_its_first_step() -> None:
    """Coming together costs it nothing, doing so again for its next step does."""
    arbiters = LaneArbiter(1, 10.0)
    arbiters.switch(1, hard=False, weave_steps=1, now_s=0.0)
    ready = {1: True, 2: True}
    arbiters.ran(1, 0.2, more=True, leads=True, took_s=0.2)
    for now in (0.4, 0.6):
        assert arbiters.choose(now - 0.1, ready, message=False) == StepLane(2)
        assert arbiters.announce(2)
        arbiters.ran(2, now, more=True, leads=True, took_s=0.02, waited_s=0.2)
    assert arbiters.choose(0.6, ready, message=False) == StepLane(1)


@pytest.mark.parametrize("k", [2, 3, 8])
def test_two_older_lanes_share_the_arbiters_that_are_not_the_presents(k: int) -> None:
    """Each of them gets at most one step for k of the present lane, and at least one for k plus the
    other's.
    """
    engines = node([2, 2, 2, 2], {(0, 1), (0,), (0, 1, 2, 3)}, k=k)
    engines.run_until(10.0)
    present, alone, wide = (len(steps(engines, 0, size)) for size in (2, 1, 4))
    for older in (alone, wide):
        assert present / (2 * k) - 2 <= older <= present / k + 2
    assert present > 10.0 / EVENLY_S / 2


def test_an_idle_present_lane_leaves_all_arbiters_to_older_ones() -> None:
    """However many steps it could have."""
    engines = node([2, 2], {(0,), (1,)}, k=1000)
    engines.run_until(2.0)
    for engine in (0, 1):
        assert len(steps(engines, engine, 1)) >= 2.0 / EVENLY_S - 1


# ---- hard


@pytest.mark.parametrize(("present", "older"), [([2, 2], (0,)), ([2, 2], (1,)), ([1, 1], (0, 1))])
def test_hard_leaves_older_lanes_alone_but_for_one_step_in_max_pause(
    present: list[int], older: Group
) -> None:
    """While the present lane is busy: not earlier, and not later than the step that is under way
    then.
    """
    pause = 0.25
    busy = {older, *Layout.uniform(2, present[0]).groups}
    engines = node(present, busy, hard=True, k=1, max_pause_s=pause)
    engines.run_until(10.0)
    leader = older[0]
    mine = steps(engines, leader, len(older))
    assert len(mine) >= 10.0 / (pause + 3 * EVENLY_S) - 2
    for (_, ended, _), (began, _, _) in pairwise(mine):
        # a group's step is planned when it is due, and begins when its members come to it
        assert pause - TICK_S <= began - ended <= pause + 2 * EVENLY_S + 2 * ORDER_S
    # none at once after the switch, but for what a member does before the first message has arrived
    assert not [began for began, _, _ in mine if ORDER_S <= began < pause]
    others = [step for step in steps(engines, leader) if step[2] != len(older)]
    assert sum(ended - began for began, ended, _ in others) > 10.0 * 0.7


def test_hard_lets_older_lanes_run_when_the_present_one_is_idle() -> None:
    """Nothing is paused for nothing."""
    engines = node([2, 2], {(0,), (1,)}, hard=True)
    engines.run_until(2.0)
    assert len(steps(engines, 0, 1)) >= 2.0 / EVENLY_S - 1


# ---- holding


@pytest.mark.parametrize("hard", [True, False])
def test_a_member_keeps_still_for_its_group_but_not_for_long(hard: bool) -> None:
    """Its leader said that there is more, and nothing comes: after HOLD_S it goes on with its own
    work.
    """
    engines = node([2, 2], {(0, 1), (1,)}, hard=hard, k=1000)
    engines.run_until(1.0)
    # before the first message arrived
    assert [began for began, _, _ in steps(engines, 1, 1)] in (
        [],
        [0.0],
    )
    engines.busy = {(1,)}
    engines.run_until(2.0)
    last = steps(engines, 1, 2)[-1][1]
    alone = [step for step in steps(engines, 1, 1) if step[0] >= last]
    assert last + HOLD_S - TICK_S <= alone[0][0] <= last + HOLD_S + 2 * TICK_S
    assert all(later[0] == earlier[1] for earlier, later in pairwise(alone))
    assert len(alone) > 20


def test_member_does_not_hold_after_the_last_step() -> None:
    """The leader said that there is nothing more; nor does a leader wait for itself, nor anyone
    after a switch.
    """
    ready = {1: True}
    arbiters = LaneArbiter(1000, 1e6)
    arbiters.switch(2, hard=False, weave_steps=1000, now_s=0.0)
    arbiters.ran(2, 1.0, more=False, leads=False)
    assert arbiters.choose(1.0, ready, message=False) == StepLane(1)
    arbiters.ran(2, 2.0, more=True, leads=True)
    assert arbiters.choose(2.0, ready, message=False) == StepLane(1)
    arbiters.ran(2, 3.0, more=True, leads=False)
    assert isinstance(arbiters.choose(3.0, ready, message=False), Wait)
    arbiters.switch(4, hard=False, weave_steps=1000, now_s=3.0)
    assert arbiters.choose(3.0, ready, message=False) == StepLane(1)
