"""Policies: what each of them changes and when; none is restless at the boundary of a load."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_lab.workload.model import Request
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES, ForUrgent, satisfies
from flying_serving.policy.ranking import Ranking
from flying_serving.policy.snapshot import GroupLoad, Need, Snapshot
from flying_serving.policy.switching import leaving
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.work import Work
from harness.examples import examples
from tests.unit.policy.costs import costs
from tests.unit.policy.simulated import arrivals, serve
from tests.unit.policy.situations import situations
from tests.unit.policy.snapshots import (
    BUSY,
    OBJECTIVE,
    QUIET,
    SIZES,
    chosen,
    decide,
    load,
    snapshot,
)

NARROW, PAIRS, WIDE = (Layout.uniform(4, size) for size in SIZES)
LAYOUTS = Layout.all(4, SIZES)
LONG, LONGER = (
    Need(size, urgent=False, reason=f"context: a request needs {size} engines") for size in (2, 4)
)
URGENT = Need(2, urgent=True, reason="priority: 1 urgent requests", waiting=1)
NEEDS = st.lists(st.sampled_from([LONG, LONGER, URGENT]), max_size=2, unique=True)


# ---- what is decided


@pytest.mark.parametrize("policy", ["auto", "load"])
def test_wide_when_quiet_narrow_under_load(policy: str) -> None:
    """From any layout for which that gains enough; and it stays there."""
    for layout in LAYOUTS:
        assert chosen(policy, snapshot(layout, BUSY)) == NARROW
    for layout in (NARROW, WIDE):
        assert chosen(policy, snapshot(layout, QUIET)) == WIDE


def test_a_layout_that_is_better_at_everything_is_kept_under_every_load() -> None:
    """With groups that win both, or neither."""
    apart, together = Layout.uniform(2, 1), Layout.uniform(2, 2)
    for fixed, rest, best in ((0.6, 0.4, together), (1.5, 1.3, apart)):
        for work in (QUIET, replace(QUIET, rate=2.0), replace(BUSY, rate=6.0)):
            for layout in (apart, together):
                assert (
                    chosen("auto", snapshot(layout, work, lanes=costs((1, 2), fixed, rest))) == best
                )


@pytest.mark.parametrize("policy", ["static-dp", "static-tp", "split", "manual"])
@given(situation=situations(), needs=NEEDS)
def test_fixed_policies_keep_the_layout_under_any_need(
    policy: str, situation: tuple[Snapshot, Layout], needs: list[Need]
) -> None:
    assert decide(policy, replace(situation[0], needs=needs)) is None


@pytest.mark.parametrize("policy", POLICIES)
@given(situation=situations(), needs=NEEDS)
def test_request_left_behind_stays_while_an_urgent_request_runs(
    policy: str, situation: tuple[Snapshot, Layout], needs: list[Need]
) -> None:
    """Or if there are none, or the policy does not choose the layout."""
    shot = replace(situation[0], needs=needs)
    chosen_by = POLICIES[policy]
    if chosen_by.migrates_left_behind(shot, OBJECTIVE):
        assert chosen_by.decides
        assert leaving(shot, shot.layout)
        assert not (chosen_by.by_priority and URGENT in needs)


def test_streams_migrate_and_prompts_end_where_they_began() -> None:
    """A group computes a prompt sooner than one engine, and what streams is woven in at everybody's
    cost.
    """
    migrations = {4: MigrationCost(0.01, 2e-5)}
    prompt, stream = GroupLoad(1, 5.0, 10.0, 2000.0, 2000, 1), GroupLoad(1, 100.0, 200.0, 2000.0)
    prompts, streams = replace(QUIET, begun=7.0), replace(BUSY, running=1.0)
    for work, left, migrates in ((prompts, prompt, False), (streams, stream, True)):
        shot = snapshot(NARROW, work, {(0, 1, 2, 3): left}, migrations=migrations)
        assert POLICIES["auto"].migrates_left_behind(shot, OBJECTIVE) == migrates


def test_the_fixed_policies_have_a_size() -> None:
    """The least and the largest; all others may change."""
    pinned = {
        name: policy.pinned_size([1, 2, 4])
        for name, policy in POLICIES.items()
        if policy.pinned_size
    }
    assert pinned == {"static-dp": 1, "static-tp": 4, "split": 1}


def test_needs_are_met_by_policies_that_know_them() -> None:
    """`context` ignores what is urgent, `priority` what is long, `load` both."""
    for policy, long, urgent in (
        ("auto", True, True),
        ("context", True, False),
        ("priority", False, True),
        ("load", False, False),
    ):
        assert satisfies(chosen(policy, snapshot(NARROW, BUSY, needs=[LONG])), [LONG]) == long
        assert satisfies(chosen(policy, snapshot(NARROW, BUSY, needs=[URGENT])), [URGENT]) == urgent


def test_no_more_engines_than_needed_are_bound_under_load() -> None:
    """One group of two for a long request, the others go on alone; which two depends on the running
    requests.
    """
    loads = {(0,): load(20), (1,): load(20)}
    layout = chosen("auto", snapshot(NARROW, BUSY, loads, [LONG]))
    assert sorted(map(len, layout.groups)) == [1, 1, 2]
    assert chosen("auto", snapshot(NARROW, BUSY, needs=[LONGER])) == WIDE


@pytest.mark.parametrize(
    ("work", "way"), [(Work(0.0, 300.0, 60.0, 1.0), "sequential"), (BUSY, "migrate")]
)
def test_long_prompt_does_not_hold_back_other_requests(work: Work, way: str) -> None:
    """Alone it lets what is nearly done end first; if others wait and come, that would cost more
    than moving it.
    """
    loads = {(0,): load(6, 3.0), (1,): load(6, 3.0)}
    shot = snapshot(
        Layout.uniform(2, 1), work, loads, [LONG], migrations={2: MigrationCost(0.02, 3e-5)}
    )
    decision = decide("auto", shot)
    assert decision is not None
    assert decision.layout == Layout.uniform(2, 2)
    assert decision.mode == way


@pytest.mark.parametrize(
    ("policy", "need"), [("context", LONG), ("priority", URGENT), ("auto", LONG), ("auto", URGENT)]
)
def test_a_group_stays_as_long_as_somebody_needs_it(policy: str, need: Need) -> None:
    """And is released then: under load, or where nothing but the need speaks for it."""
    layout = chosen(policy, snapshot(NARROW, BUSY, needs=[need]))
    assert satisfies(layout, [need])
    assert chosen(policy, snapshot(layout, BUSY, needs=[need])) == layout
    assert chosen(policy, snapshot(layout, BUSY)) == NARROW


@pytest.mark.parametrize("policy", ["auto", "context"])
@pytest.mark.parametrize(
    ("rest", "best"), [(0.7, Layout.uniform(2, 2)), (0.95, Layout.uniform(2, 1))]
)
def test_group_is_kept_for_long_requests_if_that_costs_less(
    policy: str, rest: float, best: Layout
) -> None:
    """Others share its steps meanwhile; not where the group does so much less than its engines
    apart.
    """
    together = Layout.uniform(2, 2)
    lanes, migrations = costs((1, 2), 1.2, rest), {2: MigrationCost(0.002, 1e-6)}
    work = Work(2.0, 300.0, 60.0, 2.0, running=8.0)
    long = GroupLoad(1, 60.0, 60.0, 2000.0)
    held = snapshot(
        together,
        work,
        {(0, 1): replace(load(8), by_least_size={2: long})},
        lanes=lanes,
        migrations=migrations,
    )
    assert chosen(policy, held) == best
    assert chosen(policy, replace(held, loads={(0, 1): load(8)})) == Layout.uniform(2, 1)


@settings(max_examples=examples(300))
@given(
    situation=situations(),
    needs=NEEDS,
    name=st.sampled_from(sorted(POLICIES)),
    promised=st.floats(0, 50),
)
def test_decisions_are_to_another_layout_and_say_why(
    situation: tuple[Snapshot, Layout], needs: list[Need], name: str, promised: float
) -> None:
    """The cheapest way is taken; a switch for load gains more than it costs, one for a need meets
    it. `auto` meets urgent needs at a price: `test_policies_urgent.py`.
    """
    policy = POLICIES[name]
    shot = replace(situation[0], needs=needs, promised=promised)
    decision = decide(name, shot)
    always = [
        need
        for need in needs
        if (policy.for_urgent is ForUrgent.ALWAYS if need.urgent else policy.by_context)
    ]
    if decision is None:
        assert satisfies(shot.layout, always)
        return
    assert decision.layout in shot.layouts
    assert decision.layout != shot.layout
    assert decision.cost == decision.considered[decision.mode] == min(decision.considered.values())
    assert satisfies(decision.layout, always)
    if not satisfies(shot.layout, always):
        assert decision.gain == math.inf
        unmet = [need for need in always if not satisfies(shot.layout, [need])]
        named = unmet if policy.joins_for_long else always
        assert all(need.reason in decision.reason for need in named)
    elif URGENT.reason in decision.reason:
        assert satisfies(decision.layout, needs)
        assert decision.gain > 2 * decision.cost
    elif policy.by_load:
        assert decision.reason.startswith("load")
        assert decision.gain > decision.cost
        change = decision.predicted[shot.layout] - decision.predicted[decision.layout]
        assert decision.gain == pytest.approx(change)


def test_in_the_best_layout_the_next_best_is_shown_with_its_loss() -> None:
    """Its gain is negative, and what switching to it would cost is not looked at."""
    found = POLICIES["load"].decide(snapshot(NARROW, BUSY), OBJECTIVE)
    assert found is not None
    assert found.layout.shape == (1, 1, 2)
    assert not found.is_made
    assert found.considered == {}
    assert found.gain == found.predicted[NARROW] - found.predicted[found.layout] < 0.0
    assert set(found.predicted) >= {NARROW, PAIRS, WIDE}


def test_a_decision_for_a_need_shows_the_layouts_that_meet_it() -> None:
    """It has no least gain: a request cannot run otherwise."""
    found = decide("auto", snapshot(NARROW, BUSY, needs=[LONG]))
    assert found is not None
    assert {layout.shape for layout in found.predicted} == {(1, 1, 2), (2, 2), (4,)}
    assert found.promised is None
    assert found.least_gain is None


# ---- how often


def test_a_layout_for_a_need_is_the_best_with_its_switch() -> None:
    """All engines in one group are better, and long requests would have to leave two of them."""
    long = {(2,): load(20, left=500.0), (3,): load(20, left=500.0)}
    decision = decide("auto", snapshot(NARROW, QUIET, long, [LONG]))
    assert decision is not None
    assert min(decision.predicted, key=decision.predicted.__getitem__) == WIDE
    assert decision.layout == Layout(((0, 1), (2,), (3,)))


@settings(max_examples=examples(200))
@given(
    situation=situations(),
    needs=NEEDS,
    name=st.sampled_from(["auto", "load", "priority", "context"]),
)
def test_a_switch_is_not_taken_back_at_once(
    situation: tuple[Snapshot, Layout], needs: list[Need], name: str
) -> None:
    """Seen from the new layout with the same work, it is right until something else arrives."""
    shot = replace(situation[0], needs=needs)
    for _ in range(4):
        decision = decide(name, shot)
        if decision is None:
            return
        assert decision.layout != situation[0].layout
        shot = replace(shot, layout=decision.layout, promised=shot.promised + decision.gain)
    raise AssertionError("it does not come to rest")


@given(situation=situations(), promised=st.floats(0, 50))
def test_promised_gains_never_make_another_switch_easier(
    situation: tuple[Snapshot, Layout], promised: float
) -> None:
    """What is decided after some switches would be decided without them, too."""
    shot = situation[0]
    after = decide("load", replace(shot, promised=promised))
    if after is not None:
        before = decide("load", shot)
        assert before is not None
        assert before.layout == after.layout


@pytest.mark.deep
@pytest.mark.parametrize("rate", [1.6, 2.0, 2.4, 2.8])
def test_a_load_around_the_crossover_makes_few_switches(rate: float) -> None:
    """Five minutes of arrivals at random: at most two switches a minute."""
    node = serve("auto", costs(fixed=0.5, rest=0.65), arrivals(rate, 300.0, begin_s=5.0))
    during = [
        switch for switch in node.controller.state.switches.kept if 5.0 < switch.decided_s < 305.0
    ]
    assert len(during) <= 10


@pytest.mark.deep
def test_the_loads_above_are_around_the_crossover() -> None:
    """Less is served wide, more is served narrow."""
    for rate, layout in ((0.5, Layout.uniform(2, 2)), (6.0, Layout.uniform(2, 1))):
        node = serve("auto", costs(fixed=0.5, rest=0.65), arrivals(rate, 60.0, begin_s=5.0))
        times = [*node.outcome.layouts, (65.0, layout)]
        spent_s = sum(
            max(0.0, min(65.0, end_s) - max(5.0, begin_s))
            for (begin_s, present), (end_s, _) in pairwise(times)
            if present == layout
        )
        assert spent_s > 50.0


@pytest.mark.parametrize("count", [30, 100])
def test_a_burst_is_answered_within_two_steps(count: int) -> None:
    """From idle, and the server was wide: the engines work apart after the step under way and at
    most one more.
    """
    lanes = costs(fixed=0.5, rest=0.65)
    node = serve(
        "auto", lanes, [Request(number, 10.0 + 0.001 * number, 300, 60) for number in range(count)]
    )
    first = next(
        switch for switch in node.controller.state.switches.kept if switch.decided_s >= 10.0
    )
    assert first.new == Layout.uniform(2, 1)
    assert first.cutover_ms is not None
    longest_s = lanes[2].step_s(512, 0, 0)
    assert first.decided_s + first.cutover_ms / 1e3 - 10.0 < 2 * longest_s


def test_a_switch_is_made_only_if_weights_are_back_in_time() -> None:
    """What narrower groups gain has to outweigh the time until they open."""
    busy = snapshot(WIDE, BUSY, {(0, 1, 2, 3): load(8)}, migrations={4: MigrationCost(0.002, 1e-6)})
    assert decide("auto", replace(busy, opens_in_s={(0, 1, 2, 3): 0.1})) is not None
    assert decide("auto", replace(busy, opens_in_s={(0, 1, 2, 3): 60.0})) is None


def test_no_group_is_given_up_whose_loan_is_in_use() -> None:
    shot = snapshot(WIDE, loads={(0, 1, 2, 3): load(1)})
    for policy in ("auto", "context", "priority"):
        assert decide(policy, replace(shot, layouts=[WIDE])) is None


@pytest.mark.parametrize("policy", ["auto", "load"])
@pytest.mark.parametrize("running", [0, 1, 2])
def test_a_wide_layout_that_is_worse_is_left_however_few_run(policy: str, running: int) -> None:
    """One request is no reason to stay: a quiet server mostly has none or one."""
    wide = Layout.uniform(2, 2)
    loads = {wide.groups[0]: load(running)} if running else {}
    work = replace(QUIET, rate=0.5, running=float(running))
    assert chosen(
        policy, snapshot(wide, work, loads, lanes=costs((1, 2), 1.5, 1.3))
    ) == Layout.uniform(2, 1)


def test_a_lone_request_stays_in_its_group_where_that_is_better() -> None:
    """However long it is, and however soon its own arrival seems to say that the next one comes."""
    work = replace(BUSY, rate=0.5, prompt_tokens=15_000.0, waiting=0.0, running=1.0)
    loads = {WIDE.groups[0]: load(1, context=15_000.0, prefill=15_000)}
    assert chosen("auto", snapshot(WIDE, work, loads)) == WIDE
    assert (
        chosen(
            "auto", snapshot(WIDE, replace(BUSY, rate=6.0, running=6.0), {WIDE.groups[0]: load(6)})
        )
        != WIDE
    )


@pytest.mark.parametrize("policy", ["auto", "context"])
def test_a_group_for_a_long_request_stays_as_long_as_it_promises(policy: str) -> None:
    """What there is to gain by going back at once: it has to be more than that."""
    lanes, work = costs((1, 2), 1.5, 1.3), replace(QUIET, rate=2.0)
    apart, together = Layout.uniform(2, 1), Layout.uniform(2, 2)
    made = decide(policy, snapshot(apart, work, needs=[LONG], lanes=lanes))
    assert made is not None and made.layout == together
    worse = snapshot(together, work, lanes=lanes)
    figures = Ranking.of([together, apart], worse, OBJECTIVE).figures()
    assert made.promise == pytest.approx(figures[together] - figures[apart])
    assert made.promise > 0
    assert chosen(policy, replace(worse, promised=made.promise)) == together
    assert chosen(policy, worse) == apart


def test_urgent_need_makes_no_promise() -> None:
    made = decide("auto", snapshot(NARROW, BUSY, needs=[URGENT]))
    assert made is not None and made.promise == 0.0
