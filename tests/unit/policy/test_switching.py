"""What a switch costs: which ways there are, and what makes each of them dearer."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.config import MODES
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.ranking import Ranking
from flying_serving.policy.snapshot import LATER, GroupLoad, Need, Snapshot
from flying_serving.policy.switching import SwitchCandidate, costs, leaving, stragglers_of
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.work import Work
from harness.examples import examples
from tests.unit.policy.costs import costs as lane_costs
from tests.unit.policy.situations import situations
from tests.unit.policy.snapshots import BUSY, OBJECTIVE, PLAIN, QUIET, load, snapshot

NARROW, WIDE = Layout.uniform(2, 1), Layout.uniform(2, 2)
QUICK = MigrationCost(0.002, 1e-6)


def migrate_cost(
    migrations: dict[int, MigrationCost], old: Layout, new: Layout, loads: dict[Group, GroupLoad]
) -> float:
    """Return the cost of migrating requests."""
    return costs(
        snapshot(old, BUSY, loads, migrations=migrations), new, OBJECTIVE, PLAIN, urgent=False
    )["migrate"]


def pause_s(
    old: Layout, new: Layout, loads: dict[Group, GroupLoad], migrations: dict[int, MigrationCost]
) -> float:
    """Return the seconds that old requests pause while they migrate."""
    shot = snapshot(old, QUIET, loads, migrations=migrations)
    return SwitchCandidate.of(shot, new, leaving(shot, new), OBJECTIVE, PLAIN).pause_s()


def price(
    way: str,
    old: Layout,
    new: Layout,
    work: Work,
    loads: dict[Group, GroupLoad],
    *,
    urgent: bool = False,
) -> float:
    """Return the cost of one way."""
    return costs(snapshot(old, work, loads), new, OBJECTIVE, PLAIN, urgent=urgent)[way]


@settings(max_examples=examples(300))
@given(situation=situations(), urgent=st.booleans())
def test_every_way_has_a_cost(situation: tuple[Snapshot, Layout], urgent: bool) -> None:
    """Not negative and finite; only ways that a server knows."""
    shot, new = situation
    found = costs(shot, new, OBJECTIVE, PLAIN, urgent=urgent)
    assert all(0 <= cost < math.inf for cost in found.values())
    assert set(found) <= set(MODES)
    old = leaving(shot, new)
    assert set(old) == {group for group in shot.loads if group not in new.groups}
    assert (set(found) == {"weave"}) == (not old)


def test_switch_of_an_idle_server_costs_almost_nothing() -> None:
    """Nor of groups that stay; then it costs next to nothing."""
    assert set(costs(snapshot(NARROW), WIDE, OBJECTIVE, PLAIN, urgent=False)) == {"weave"}
    mixed = Layout(((0, 1), (2,), (3,)))
    shot = snapshot(mixed, BUSY, {(2,): load(10)})
    assert leaving(shot, Layout.uniform(4, 1)) == {}
    assert set(leaving(shot, Layout.uniform(4, 2))) == {(2,)}


def test_a_switch_waits_for_weights_that_are_lent() -> None:
    """For as long as they take; a layout with the group that lends them does not."""
    shot = snapshot(WIDE, BUSY, {(0, 1): load(8)}, migrations={2: QUICK})
    at = [
        costs(replace(shot, opens_in_s={(0, 1): time_s}), NARROW, OBJECTIVE, PLAIN, urgent=False)
        for time_s in (0, 1, 8)
    ]
    assert at[0] == costs(shot, NARROW, OBJECTIVE, PLAIN, urgent=False)
    assert all(at[0][mode] < at[1][mode] < at[2][mode] for mode in at[0])
    apart = replace(snapshot(NARROW, BUSY, {(0,): load(8)}), opens_in_s={(0, 1): 8.0})
    assert costs(apart, WIDE, OBJECTIVE, PLAIN, urgent=False) == costs(
        replace(apart, opens_in_s={}), WIDE, OBJECTIVE, PLAIN, urgent=False
    )


def test_old_requests_keep_one_that_needs_a_loan_waiting() -> None:
    old = snapshot(NARROW, QUIET, {(0,): load(4)}, [Need(2, urgent=False, reason="")])
    lends = replace(old, needs=[replace(old.needs[0], lends=True)])
    woven = [costs(shot, WIDE, OBJECTIVE, PLAIN, urgent=False)["weave"] for shot in (old, lends)]
    assert woven[1] > woven[0]


def test_an_idle_member_makes_a_soft_switch_possible() -> None:
    """To a group only, and only if one of its engines has nothing to do."""
    one, both = {(0,): load(4)}, {(0,): load(4), (1,): load(4)}
    assert "soft" in costs(snapshot(NARROW, QUIET, one), WIDE, OBJECTIVE, PLAIN, urgent=False)
    assert "soft" not in costs(snapshot(NARROW, QUIET, both), WIDE, OBJECTIVE, PLAIN, urgent=False)
    assert "soft" not in costs(
        snapshot(WIDE, QUIET, {(0, 1): load(4)}), NARROW, OBJECTIVE, PLAIN, urgent=False
    )
    pairs = snapshot(Layout.uniform(4, 2), QUIET, {(0, 1): load(4)})
    assert "soft" not in costs(pairs, Layout.uniform(4, 1), OBJECTIVE, PLAIN, urgent=False)
    elsewhere = snapshot(Layout.uniform(4, 1), QUIET, {(0,): load(4), (1,): load(4)})
    assert "soft" not in costs(
        elsewhere, Layout(((0, 1), (2,), (3,))), OBJECTIVE, PLAIN, urgent=False
    )


def test_waiting_for_old_requests_costs_queued_and_new_requests() -> None:
    """The longer the old requests take, the more."""
    short, long = {(0,): load(4, left=5)}, {(0,): load(4, left=200)}
    assert price("sequential", NARROW, WIDE, BUSY, short) < price(
        "sequential", NARROW, WIDE, BUSY, long
    )
    assert price("sequential", NARROW, WIDE, QUIET, long) < price(
        "sequential", NARROW, WIDE, BUSY, long
    )
    urgent = price("sequential", NARROW, WIDE, BUSY, short, urgent=True)
    assert urgent > price("sequential", NARROW, WIDE, BUSY, short)


def test_a_pause_costs_the_paused() -> None:
    """As long as there is new work, the more of them the more."""

    def pause(work: Work, loads: dict[Group, GroupLoad]) -> float:
        return price("hard", NARROW, WIDE, work, loads, urgent=True)

    few, many = {(0,): load(2)}, {(0,): load(20)}
    assert "hard" not in costs(snapshot(NARROW, BUSY, few), WIDE, OBJECTIVE, PLAIN, urgent=False)
    assert pause(BUSY, few) < pause(BUSY, many)
    assert pause(QUIET, many) < pause(BUSY, many)


def test_computing_again_costs_by_the_context() -> None:
    """A long context is dear, a short one is cheap, however much is left to come."""
    short, long = {(0,): load(4, context=20)}, {(0,): load(4, context=8000)}
    assert price("migrate", NARROW, WIDE, BUSY, short) < price("migrate", NARROW, WIDE, BUSY, long)
    ends = {(0,): load(4, left=1.0)}
    assert price("migrate", NARROW, WIDE, QUIET, ends) == price(
        "migrate", NARROW, WIDE, QUIET, {(0,): load(4)}
    )


def test_migrating_kv_costs_next_to_nothing() -> None:
    """Little of what computing again does; more if it takes longer; not less where it was measured
    elsewhere.
    """
    loads = {(0,): load(4, context=2000), (1,): load(8, context=2000)}
    again = migrate_cost({}, NARROW, WIDE, loads)
    quick, slow = (
        migrate_cost({2: cost}, NARROW, WIDE, loads) for cost in (QUICK, MigrationCost(0.05, 2e-5))
    )
    assert quick < slow < again
    assert quick < 0.05 * again
    assert migrate_cost({4: QUICK}, NARROW, WIDE, loads) == again


def test_enclosing_groups_migrate_side_by_side_and_pairs_in_sequence() -> None:
    """Seconds that the engines pause, computed by hand."""
    singles, pairs, all_four = (Layout.uniform(4, size) for size in (1, 2, 4))
    cost = MigrationCost(0.010, 1e-5)
    four = {(n,): load(5, context=100 * (n + 1)) for n in range(4)}
    assert pause_s(singles, pairs, four, {2: cost}) == pytest.approx(
        2 * 0.010 + 1e-5 * 5 * (300 + 400)
    )
    assert pause_s(singles, all_four, four, {4: cost}) == pytest.approx(4 * 0.010 + 1e-5 * 5 * 1000)
    two = {(0, 1): load(5, context=100), (2, 3): load(1, context=300)}
    assert pause_s(pairs, singles, two, {2: cost}) == pytest.approx(2 * 0.010 + 1e-5 * 500)
    assert pause_s(pairs, singles, {(2, 3): load(1, context=300)}, {2: cost}) == pytest.approx(
        0.010 + 1e-5 * 300
    )
    again_s = 800 * snapshot(pairs).lane_figures[1].cost.prefill_token_s / 4
    assert pause_s(pairs, singles, two, {4: cost}) == pytest.approx(again_s)


def with_long(requests: int, left: float, context: float = 2000.0, needs: int = 2) -> GroupLoad:
    """Return what runs in a group: short requests, and one that needs `needs` engines."""
    long = GroupLoad(1, left, left, context)
    return replace(
        load(requests + 1), by_least_size={2**power: long for power in range(1, needs.bit_length())}
    )


def staying(shot: Snapshot, new: Layout) -> dict[Group, GroupLoad]:
    """Return those that no group of a new layout can hold."""
    return stragglers_of(leaving(shot, new), new)


def test_request_that_no_new_group_holds_stays_behind() -> None:
    """In a layout that is too narrow; a group that stays keeps its requests."""
    four = snapshot(Layout.uniform(4, 4), BUSY, {(0, 1, 2, 3): with_long(4, 50.0, needs=2)})
    assert staying(four, Layout.uniform(4, 2)) == {}
    assert staying(four, Layout(((0, 1), (2,), (3,)))) == {}
    assert set(staying(four, Layout.uniform(4, 1))) == {(0, 1, 2, 3)}
    pair = snapshot(Layout.uniform(4, 2), BUSY, {(0, 1): with_long(4, 50.0)})
    assert set(staying(pair, Layout(((0,), (1,), (2, 3))))) == set()
    assert staying(pair, Layout(((0, 1), (2,), (3,)))) == {}


def test_stragglers_do_not_migrate() -> None:
    """They are woven: migrating the others costs more the longer they run; without others it is the
    weave.
    """
    short, long = ({(0, 1): with_long(4, left)} for left in (10.0, 200.0))
    free = migrate_cost({2: QUICK}, WIDE, NARROW, {(0, 1): load(5)})
    assert (
        free
        < migrate_cost({2: QUICK}, WIDE, NARROW, short)
        < migrate_cost({2: QUICK}, WIDE, NARROW, long)
    )
    alone = GroupLoad(1, 40.0, 40.0, 2000.0)
    shot = snapshot(
        WIDE, BUSY, {(0, 1): replace(alone, by_least_size={2: alone})}, migrations={2: QUICK}
    )
    ways = costs(shot, NARROW, OBJECTIVE, PLAIN, urgent=False)
    assert ways["migrate"] == pytest.approx(ways["weave"])


def test_the_pause_is_of_the_kv_that_migrates() -> None:
    """By hand: five requests of 400 tokens migrate, one of 2,000 stays."""
    cost = MigrationCost(0.010, 1e-5)
    loads = {(0, 1): replace(with_long(5, 50.0), context_tokens=4000 / 6)}
    shot = snapshot(WIDE, QUIET, loads, migrations={2: cost})
    found = SwitchCandidate.of(shot, NARROW, leaving(shot, NARROW), OBJECTIVE, PLAIN).pause_s()
    assert found == pytest.approx(2 * 0.010 + 1e-5 * 2000)


def test_waiting_for_stragglers_costs_the_output_lost_meanwhile() -> None:
    """More the longer they run and the less the group does; without stragglers there is no need to
    wait.
    """
    work = Work(2.0, 300.0, 60.0, 2.0, running=5.0)

    def wait(left: float, rest: float = 0.65) -> float:
        shot = snapshot(
            WIDE, work, {(0, 1): with_long(4, left)}, lanes=lane_costs((1, 2), 0.5, rest)
        )
        return costs(shot, NARROW, OBJECTIVE, PLAIN, urgent=False)[LATER]

    assert 0 < wait(5.0) < wait(50.0) < wait(200.0)
    assert wait(50.0, rest=0.6) < wait(50.0, rest=0.8)
    for shot, new in (
        (snapshot(WIDE, work, {(0, 1): load(5)}), NARROW),
        (snapshot(NARROW, QUIET, {(0, 1): with_long(4, 50.0)}), WIDE),
    ):
        assert LATER not in costs(shot, new, OBJECTIVE, PLAIN, urgent=False)


def test_no_engine_idles_until_stragglers_have_ended() -> None:
    """Staying for that long is better, unless a request is urgent."""
    shot = snapshot(WIDE, BUSY, {(0, 1): with_long(4, 50.0)})
    assert "sequential" not in costs(shot, NARROW, OBJECTIVE, PLAIN, urgent=False)
    assert "sequential" in costs(shot, NARROW, OBJECTIVE, PLAIN, urgent=True)
    assert "sequential" in costs(
        snapshot(WIDE, BUSY, {(0, 1): load(5)}), NARROW, OBJECTIVE, PLAIN, urgent=False
    )


def test_a_soft_switch_is_cheaper_if_kv_migrates() -> None:
    """Requests that an idle engine has begun are not computed again in the group."""
    shots = [
        snapshot(NARROW, BUSY, {(0,): load(4, left=5)}, migrations=migrations)
        for migrations in ({}, {2: QUICK})
    ]
    again, kept = (costs(shot, WIDE, OBJECTIVE, PLAIN, urgent=False)["soft"] for shot in shots)
    assert kept < again


def test_the_cheapest_mode_fits_the_case() -> None:
    """A switch waits for short requests and migrates long ones. For an urgent request they may
    pause, and waiting for their end is the worst.
    """

    def cheapest_first(found: dict[str, float]) -> list[str]:
        return sorted(found, key=found.__getitem__)

    about_to_end = costs(
        snapshot(NARROW, QUIET, {(0,): load(1, left=1.0)}), WIDE, OBJECTIVE, PLAIN, urgent=False
    )
    assert cheapest_first(about_to_end) == ["soft", "sequential", "weave", "migrate"]
    waits = replace(QUIET, waiting=1.0)
    long = {(0,): load(8, left=500.0), (1,): load(8, left=500.0)}
    unhurried = costs(snapshot(NARROW, waits, long), WIDE, OBJECTIVE, PLAIN, urgent=False)
    assert cheapest_first(unhurried) == ["migrate", "sequential", "weave"]
    urgent = costs(snapshot(NARROW, waits, long), WIDE, OBJECTIVE, PLAIN, urgent=True)
    assert cheapest_first(urgent) == ["migrate", "hard", "weave", "sequential"]


@given(situation=situations())
def test_new_requests_that_wait_for_old_ones_cost_their_wait_at_least(
    situation: tuple[Snapshot, Layout],
) -> None:
    """However much sooner the old ones end meanwhile: the wait is sure, that gain is a forecast."""
    shot, layout = situation
    leave = leaving(shot, layout)
    cost = costs(shot, layout, OBJECTIVE, PLAIN, urgent=False).get("sequential")
    if not leave or cost is None:
        return
    candidate = SwitchCandidate.of(shot, layout, leave, OBJECTIVE, PLAIN)
    arriving = shot.work.rate * candidate.last_s
    assert cost >= (shot.work.waiting + arriving / 2) * candidate.last_s * (1 - 1e-9) - 1e-6


def test_modes_that_delay_first_tokens_cost_more_where_these_have_weight() -> None:
    """Layouts are ranked by the same figure."""
    shot = snapshot(NARROW, BUSY, {(0,): load(4), (1,): load(4)})
    ranking = Ranking.of([NARROW, WIDE], shot, OBJECTIVE)
    plain, weighed = (
        costs(shot, WIDE, OBJECTIVE, measure, urgent=False) for measure in (PLAIN, ranking.measure)
    )
    assert plain.keys() == weighed.keys()
    assert weighed["sequential"] > plain["sequential"] > 0.0
