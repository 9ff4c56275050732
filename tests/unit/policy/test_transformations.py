"""Gyges' transformations: engines join for long requests alone, and part once these are over."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.snapshot import GroupLoad, Need, Snapshot
from flying_serving.policy.transformations import PART_BELOW, decide, joined
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.work import Work
from tests.unit.policy.snapshots import BUSY, OBJECTIVE, QUIET, SIZES, load, snapshot
from tests.unit.policy.snapshots import decide as decide_by

NARROW, PAIRS, WIDE = (Layout.uniform(4, size) for size in SIZES)
LEFT, RIGHT = Layout(((0, 1), (2,), (3,))), Layout(((0,), (1,), (2, 3)))
LAYOUTS = Layout.all(4, SIZES)
LONG = Need(2, urgent=False, reason="context: a request needs 2 engines")
CROWDED = replace(LONG, crowded_out=1)
URGENT = Need(2, urgent=True, reason="priority: 1 urgent requests", waiting=1)
MIGRATIONS = {2: MigrationCost(0.002, 1e-6), 4: MigrationCost(0.002, 1e-6)}
ENGINE_TOKENS = 20_000
"""That one engine of `snapshot` holds."""


def shot(
    layout: Layout,
    loads: Mapping[Group, GroupLoad] | None = None,
    needs: Sequence[Need] = (),
    work: Work = QUIET,
) -> Snapshot:
    """Return a server whose KV migrates."""
    return snapshot(layout, work, loads, needs, migrations=MIGRATIONS)


def long_load(requests: int = 1) -> GroupLoad:
    """Return requests, of which one needs two engines."""
    one = load(1, 100.0, 30_000.0)
    return replace(load(requests), by_least_size={2: one})


def test_engines_with_the_least_to_do_join_for_a_long_request() -> None:
    """Exactly as many as it needs, if wider groups are worth less."""
    loads = {(0,): load(20), (1,): load(20), (3,): load(1)}
    found = decide(shot(NARROW, loads, [LONG], BUSY), OBJECTIVE)
    assert found is not None
    assert found.layout == RIGHT
    assert found.is_made
    assert found.gain == math.inf
    assert found.reason == LONG.reason


@given(layout=st.sampled_from(LAYOUTS), requests=st.lists(st.integers(0, 9), min_size=4))
def test_a_long_request_that_has_a_wide_group_makes_no_switch(
    layout: Layout, requests: list[int]
) -> None:
    """Neither while it waits for its turn there, nor while it runs. Another group parts."""
    loads = {
        group: replace(load(count), by_least_size={2: load(1)}) if len(group) > 1 else load(count)
        for group, count in zip(layout.groups, requests, strict=False)
        if count
    }
    busy = [group for group in layout.groups if len(group) > 1 and group in loads]
    found = decide(shot(layout, loads, [LONG]), OBJECTIVE)
    if not busy and layout.widest == 1:
        assert found is not None
        assert found.layout.widest > 1
    elif found is not None:
        assert set(busy) <= set(found.layout.groups)
        assert found.layout.widest > 1


def test_another_group_is_formed_only_if_no_wide_one_has_room() -> None:
    loads = {(0, 1): long_load(3)}
    assert decide(shot(LEFT, loads, [LONG]), OBJECTIVE) is None
    found = decide(shot(LEFT, loads, [CROWDED]), OBJECTIVE)
    assert found is not None
    assert found.layout in (PAIRS, WIDE)


@pytest.mark.parametrize(
    ("work", "left", "is_made"),
    [(QUIET, 5000.0, True), (QUIET, 0.1, False), (BUSY, 5000.0, False)],
)
def test_one_more_group_has_a_price(work: Work, left: float, is_made: bool) -> None:
    """A long request waits where another one ends soon, or others would lose more by a switch."""
    long = replace(load(3, left), by_least_size={2: load(1, left)})
    loads = {(0, 1): long, (2,): load(4), (3,): load(4)}
    found = decide(shot(LEFT, loads, [CROWDED], work), OBJECTIVE)
    assert found is not None
    assert found.is_made == is_made
    assert found.least_gain is not None
    assert 0.0 < found.gain <= OBJECTIVE.horizon_s
    assert found.is_made == (found.gain > found.least_gain)


def test_more_requests_that_find_no_room_pay_a_higher_price() -> None:
    long = replace(load(3, 60.0), by_least_size={2: load(1, 60.0)})
    loads = {(0, 1): long, (2,): load(4), (3,): load(4)}
    found = {
        count: decide(shot(LEFT, loads, [replace(CROWDED, crowded_out=count)]), OBJECTIVE)
        for count in (1, 3)
    }
    assert found[1] is not None
    assert found[3] is not None
    assert found[3].gain == pytest.approx(3 * found[1].gain)
    assert found[3].least_gain == found[1].least_gain


def test_narrower_requests_get_a_group_where_wider_ones_cannot() -> None:
    """There are not as many engines as the others need."""
    needs = [CROWDED, replace(CROWDED, least_size=8)]
    found = decide(shot(LEFT, {(0, 1): long_load(3)}, needs), OBJECTIVE)
    assert found is not None
    assert found.layout in (PAIRS, WIDE)


def test_a_group_without_a_price_is_made_at_any_cost() -> None:
    """For routers that know of no groups."""
    long = replace(load(3, 0.1), by_least_size={2: load(1, 0.1)})
    shown = shot(LEFT, {(0, 1): long, (2,): load(4), (3,): load(4)}, [CROWDED])
    for has_price in (True, False):
        found = decide(shown, OBJECTIVE, has_price=has_price)
        assert found is not None
        assert found.is_made != has_price


def test_a_long_request_waits_where_no_engines_are_left_to_join() -> None:
    loads = {(0, 1, 2, 3): long_load(3)}
    assert decide(shot(WIDE, loads, [CROWDED]), OBJECTIVE) is None


@pytest.mark.parametrize("share", [0.9 * PART_BELOW, PART_BELOW, 1.1 * PART_BELOW])
def test_a_group_parts_if_its_requests_leave_room_in_its_engines(share: float) -> None:
    """And not while a long request runs there, or waits for it."""
    tokens = share * 4 * ENGINE_TOKENS
    rest = replace(load(10), booked_tokens=tokens)
    found = decide(shot(WIDE, {(0, 1, 2, 3): rest}), OBJECTIVE)
    assert (found is not None) == (share <= PART_BELOW)
    if found is not None:
        assert found.is_made
        assert found.layout == NARROW
        assert found.reason == (
            f"no long request in group [0, 1, 2, 3], whose requests need {share:.0%} of its "
            "engines' memory"
        )
    held = replace(rest, by_least_size={2: load(1)})
    assert decide(shot(WIDE, {(0, 1, 2, 3): held}), OBJECTIVE) is None
    assert decide(shot(WIDE, {(0, 1, 2, 3): rest}, [LONG]), OBJECTIVE) is None


def test_the_emptier_group_parts_first_and_one_stays_that_is_needed() -> None:
    loads = {
        (0, 1): replace(load(8), booked_tokens=800.0),
        (2, 3): replace(load(2), booked_tokens=200.0),
    }
    for needs in ([], [LONG], [URGENT]):
        found = decide(shot(PAIRS, loads, needs), OBJECTIVE)
        assert (found is None) == (needs == [URGENT])
        assert found is None or found.layout == LEFT
    assert decide(shot(LEFT, loads, [LONG]), OBJECTIVE) is None


@pytest.mark.parametrize("work", [QUIET, BUSY])
def test_load_alone_makes_no_switch(work: Work) -> None:
    assert decide(shot(NARROW, work=work), OBJECTIVE) is None
    assert decide_by("gyges", shot(NARROW, work=work)) is None


@given(layout=st.sampled_from(LAYOUTS))
def test_joined_layouts_split_no_group(layout: Layout) -> None:
    found = joined(shot(layout))
    assert layout in found
    assert WIDE in found
    for one in found:
        assert len(one.groups) <= len(layout.groups)
        for group in layout.groups:
            assert set(group) <= set(one.group_of(group[0]))


def test_an_urgent_request_gets_a_group_at_its_price_and_splits_none() -> None:
    """Where others end soon it waits for them."""
    for left, is_made in ((2.0, False), (5000.0, True)):
        loads = {(n,): load(1, left) for n in range(4)}
        found = decide_by("gyges", snapshot(NARROW, BUSY, loads, [URGENT]))
        assert (found is not None) == is_made
        assert found is None or found.layout.widest >= 2
    wide = replace(URGENT, least_size=4)
    loads = {(0, 1): long_load(5), (2,): load(40, 9e3), (3,): load(40, 9e3)}
    found = decide_by("gyges", shot(LEFT, loads, [wide], BUSY))
    assert found is None or found.layout == WIDE


def test_a_group_stays_for_urgent_requests_of_its_own_alone() -> None:
    runs = replace(URGENT, waiting=0)
    for loads, stays in (
        ({(0, 1): replace(load(1), urgent=1)}, True),
        ({(0, 1): load(1), (2,): replace(load(1), urgent=1)}, False),
    ):
        found = decide(shot(LEFT, loads, [runs]), OBJECTIVE)
        assert (found is None) == stays


def test_a_group_too_dear_for_a_long_request_hides_no_urgent_one() -> None:
    """One more pair is not made for a long request, and a group for an urgent one is."""
    pair = Layout(((0, 1), *((engine,) for engine in range(2, 8))))
    wide = replace(URGENT, least_size=4)
    long = replace(load(9, 9e3), by_least_size={2: load(1, 9e3)})
    loads = {(0, 1): long} | {(engine,): load(40, 9e3) for engine in range(2, 8)}
    dear = decide(shot(pair, loads, [CROWDED], BUSY), OBJECTIVE)
    assert dear is not None
    assert not dear.is_made
    found = decide_by("gyges", shot(pair, loads, [CROWDED, wide], BUSY))
    assert found is not None
    assert found.reason == URGENT.reason
    assert found.layout.widest >= 4
