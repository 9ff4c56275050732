"""GroupChoice: the group that gives a request its first token soonest and has room, a degree
exactly, refusals.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.controller.commands import Dispatch
from flying_serving.controller.controller import Controller
from flying_serving.controller.group_choice import STEPS_AHEAD
from flying_serving.controller.loads import Loads
from flying_serving.controller.settings import Limits, Settings
from flying_serving.errors import RequestError
from flying_serving.layout.groups import Group, KVSource, Layout
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.steps import StepCost
from flying_serving.predict.work import LaneFigures, Objective
from harness.examples import examples
from tests.unit.controller.group_choices import (
    LANES,
    LIMITS,
    SINGLES,
    SIZES,
    Filled,
    choice,
    choose,
    request,
)
from tests.unit.policy.costs import costs, measured

MIXED = Layout(((0, 1), (2,), (3,)))
LAYOUTS = [SINGLES, Layout.uniform(4, 2), Layout.uniform(4, 4), MIXED, Layout(((0,), (1,), (2, 3)))]
GROUPS = [group for size in SIZES for group in Layout.uniform(4, size).groups]


# ---- what can run at all


@pytest.mark.parametrize(
    ("tokens", "degree", "message"),
    [
        (10, 3, r"tp_degree=3: must be one of \[1, 2, 4\]"),
        (10, 0, r"tp_degree=0: must be one of \[1, 2, 4\]"),
        (101, 1, "tp_degree=1: its KV cache holds 100 tokens, .* are 101; degree 2 would do"),
        (201, 1, "degree 4 would do"),
        (401, 4, "holds 400 tokens, .* are 401; no degree of this server holds them"),
        (
            401,
            None,
            r"prompt plus max_tokens are 401 tokens; the widest group \(degree 4\) holds 400",
        ),
    ],
)
def test_request_that_can_never_run_is_refused_with_the_sizes_that_can(
    tokens: int, degree: int | None, message: str
) -> None:
    """The message names what was asked for and what there is."""
    with pytest.raises(RequestError, match=message):
        choice().capacity.check(tokens, degree)


def test_degrees_count_devices() -> None:
    """With two devices each, degree 2 is one engine."""
    one = choice(devices=2).capacity
    assert one.check(10, 4) == (2,)
    assert one.check(10, 2) == (1,)
    assert one.check(150, None) == (2, 4)
    with pytest.raises(RequestError, match=r"tp_degree=1: must be one of \[2, 4, 8\]"):
        one.check(10, 1)


@settings(max_examples=examples(200))
@given(
    layout=st.sampled_from(LAYOUTS),
    devices=st.sampled_from([1, 2]),
    tokens=st.tuples(*[st.integers(1, 9)] * 3).map(lambda t: tuple(sorted(t))),
    needed=st.integers(1, 10),
    degree=st.none() | st.integers(0, 9),
    load=st.lists(st.sampled_from(GROUPS), max_size=20),
    limits=st.sampled_from([LIMITS, Limits(4, 64, capped=False)]),
)
def test_admitted_request_gets_a_group_that_holds_it(
    layout: Layout,
    devices: int,
    tokens: tuple[int, ...],
    needed: int,
    degree: int | None,
    load: list[Group],
    limits: Limits,
) -> None:
    """In this layout or another one as soon as it is idle; what does not pass fits nowhere."""
    one = choice(limits, devices, tokens)
    sizes = tuple(
        s
        for s, holds in zip(SIZES, tokens, strict=True)
        if holds >= needed and degree in (None, s * devices)
    )
    if not sizes:
        with pytest.raises(RequestError):
            one.capacity.check(needed, degree)
        return
    assert one.capacity.check(needed, degree) == sizes
    waits = request(needed, sizes, degree)
    filled = Filled()
    for group in load:
        filled.put(group)
    group = choose(waits, layout, filled, needed, one)
    assert group is None or (group in GROUPS and len(group) in sizes)
    present = any(len(g) in sizes for g in layout.groups)
    if group is not None and present:
        assert group in layout.groups
    if not limits.capped:
        assert (group is None) == (degree is None and not present)
    assert any(choose(waits, other, Loads(), needed, one) for other in LAYOUTS)


# ---- which group


def test_an_idle_group_is_taken_before_a_busy_one() -> None:
    """And the one that does it faster before other idle ones; prompts that are not done count."""
    loads = Filled()
    assert choose(request(), MIXED, loads) == (0, 1)
    loads.put((0, 1), prompt=150, done=False)
    assert choose(request(), MIXED, loads) == (2,)
    loads.put((2,), done=False)
    assert choose(request(), MIXED, loads) == (3,)


def test_lanes_that_were_never_measured_share_by_requests() -> None:
    """Per engine."""
    loads = Filled()
    chosen = []
    for _ in range(8):
        group = choose(request(), MIXED, loads, 20, choice(Limits(9, 64)), {})
        assert group is not None
        loads.put(group)
        chosen.append(group)
    assert chosen == [(0, 1), (2,), (3,), (0, 1), (2,), (3,), (0, 1), (0, 1)]


def test_engines_that_still_drain_an_older_layout_come_last() -> None:
    """They step those requests in between."""
    loads = Filled()
    loads.put((0, 1))
    loads.put((0, 1))
    assert choose(request(), SINGLES, loads) == (2,)


def test_a_group_to_which_kv_can_come_is_preferred() -> None:
    """And there one token counts as room: a request that comes with its KV is in nobody's way."""
    lanes = LANES | {2: replace(LANES[2], migration=MigrationCost(0.001, 1e-6))}
    loads, pairs = Filled(), Layout.uniform(4, 2)
    streams = request(prompt=60)
    loads.add(streams, (2,), 80.0)
    loads.add_tokens(streams, 1)
    loads.remove(streams)
    streams.kv = KVSource((2,), 1)
    assert choose(streams, pairs, loads, 80, choice(), LANES) == (0, 1)
    # as near as in the other, and narrower
    assert choose(streams, pairs, loads, 80, choice(), lanes) == (
        2,
        3,
    )
    while choose(request(60), Layout.uniform(4, 4), loads, 1.0, choice(Limits(100, 64)), lanes):
        loads.put((0, 1, 2, 3), tokens=1.0, prompt=60, done=False)
    whole = {4: replace(LANES[4], migration=MigrationCost(0.001, 1e-6))}
    assert choose(streams, Layout.uniform(4, 4), loads, 1.0, choice(Limits(100, 64)), LANES) is None
    assert (
        choose(streams, Layout.uniform(4, 4), loads, 1.0, choice(Limits(100, 64)), LANES | whole)
        is not None
    )


def test_where_kv_can_migrate() -> None:
    """Anywhere, at the cost of the group that pulls it; not without KV."""
    costs = {size: MigrationCost(0.001 * size, 1e-6) for size in LANES}
    lanes = {size: replace(lane, migration=costs[size]) for size, lane in LANES.items()}
    one, by = request(), choice()
    assert by.migration(one, (0, 1), lanes) is None
    one.kv = KVSource((0,), 1)
    migrations = {group: by.migration(one, group, lanes) for group in GROUPS}
    assert migrations == {group: costs[len(group)] for group in GROUPS}
    assert by.migration(one, (1,), LANES) is None


def test_a_degree_that_is_asked_for_is_met_exactly() -> None:
    """By a group of the layout however busy it is, or by any group of that size if it has none."""
    loads = Filled()
    loads.put((0, 1), done=False)
    assert choose(request(degree=2, sizes=(2,)), MIXED, loads) == (0, 1)
    assert choose(request(degree=1, sizes=(1,)), MIXED, loads) == (2,)
    assert choose(request(degree=4, sizes=(4,)), MIXED, loads) == (0, 1, 2, 3)
    assert choose(request(degree=2, sizes=(2,)), Layout.uniform(4, 4), loads) == (2, 3)


# ---- room


def test_a_group_takes_at_most_max_num_seqs_requests() -> None:
    """A group takes so many, then none."""
    loads = Filled()
    for _ in range(LIMITS.max_num_seqs):
        assert choose(request(), Layout.uniform(4, 4), loads, 1.0) == (0, 1, 2, 3)
        loads.put((0, 1, 2, 3), tokens=1.0)
    assert choose(request(), Layout.uniform(4, 4), loads, 1.0) is None
    assert (
        choose(request(), Layout.uniform(4, 4), loads, by=choice(Limits(4, 64, capped=False)))
        is not None
    )


def test_full_group_comes_last_without_limits() -> None:
    """However near it is to the KV, also where decoding requests add little to a step; of full ones
    the nearest.
    """
    loads, by, pairs = Filled(), choice(Limits(4, 64, capped=False)), Layout.uniform(4, 2)
    cost = StepCost(0.01, 1e-4, 0.0, 0.0)
    lanes = {2: LaneFigures(cost, 4, 200, 64, migration=MigrationCost(0.001, 1e-3))}
    one = request()
    one.kv = KVSource((0, 1), 1)
    assert choose(one, pairs, loads, 20.0, by, lanes) == (0, 1)
    for group, expected in (((0, 1), (2, 3)), ((2, 3), (0, 1))):
        for _ in range(LIMITS.max_num_seqs):
            loads.put(group)
        assert choose(one, pairs, loads, 20.0, by, lanes) == expected


def test_a_request_that_says_where_it_is_split_may_begin_in_a_full_group() -> None:
    """Each of its groups counts it, so fullness would have all of them begin in the same group."""
    loads, by, pairs = Filled(), choice(Limits(4, 64, capped=False)), Layout.uniform(4, 2)
    for _ in range(LIMITS.max_num_seqs):
        loads.put((0, 1), tokens=1.0)
    loads.put((2, 3), prompt=40, done=False)
    whole, halved = request(), request()
    halved.spec = replace(halved.spec, split_at=5)
    lanes = {2: LaneFigures(StepCost(0.01, 1e-4, 0.0, 0.0), 4, 200, 64)}
    assert choose(whole, pairs, loads, 20.0, by, lanes) == (2, 3)
    assert choose(halved, pairs, loads, 20.0, by, lanes) == (0, 1)
    halved.spec = replace(halved.spec, can_migrate=False)  # so it is not split
    assert choose(halved, pairs, loads, 20.0, by, lanes) == (2, 3)


@given(prompts=st.lists(st.integers(1, 300), min_size=1, max_size=10), urgent=st.booleans())
def test_few_prompts_are_dispatched_ahead(prompts: list[int], urgent: bool) -> None:
    """A few steps' worth, whatever comes last; an urgent one goes at once, an idle group takes
    anything.
    """
    loads, layout, by = Filled(), Layout.uniform(4, 4), choice(Limits(100, 64))
    for prompt in prompts:
        ahead = loads[(0, 1, 2, 3)].prefill_tokens
        group = choose(request(prompt, priority=-urgent), layout, loads, 1.0, by)
        if group is None:
            assert ahead + min(prompt, 64) > STEPS_AHEAD * 64
            assert not urgent
        else:
            assert urgent or ahead <= STEPS_AHEAD * 64
            loads.put(group, tokens=1.0, prompt=prompt, done=False)
    assert loads.groups


@settings(max_examples=examples(200))
@given(
    requests=st.lists(st.tuples(st.sampled_from(GROUPS), st.floats(1, 60)), max_size=8),
    size=st.sampled_from(SIZES),
    tokens=st.floats(1, 100),
)
def test_memory_is_shared_by_all_groups_of_an_engine(
    requests: list[tuple[Group, float]], size: int, tokens: float
) -> None:
    """What gets a group beside others fits on every engine of its group, together with all that is
    spoken for there.
    """
    loads = Filled()
    used = dict.fromkeys(range(4), 0.0)
    for group, expected in requests:
        loads.put(group, tokens=expected)
        for engine in group:
            used[engine] += expected / (100 * len(group))
    by = choice(Limits(100, 1000))
    group = choose(request(sizes=(size,)), Layout.uniform(4, size), loads, tokens, by)
    share = tokens / (100 * size)
    fits = [
        g
        for g in Layout.uniform(4, size).groups
        if g not in loads.groups or all(used[engine] + share <= 1.0 + 1e-9 for engine in g)
    ]
    assert (
        group in fits
        if group is not None
        else not any(all(used[engine] + share <= 1.0 - 1e-9 for engine in g) for g in fits)
    )


# ---- offered to several requests


def test_a_request_that_finds_no_room_is_not_overtaken() -> None:
    """Groups in which it finds no room are kept for it; those that do not suit it are free."""
    controller = Controller(
        Settings(4, choice().capacity, POLICIES["manual"], LIMITS, Objective(10.0))
    )
    controller.state.steps.calibrate(measured(costs(SIZES)))
    controller.state.layout, controller.state.loads = MIXED, Filled()
    controller.state.loads.put((0, 1), tokens=100)
    waiting = [request(), request(150, sizes=(2, 4)), request(), request(sizes=(2,), degree=2)]
    for order, (name, one) in enumerate(
        zip(("before", "long", "short", "degree"), waiting, strict=True)
    ):
        controller.state.pool.add(replace(one, request_id=name, order=order))
    found = {
        one.request_id: one.group
        for one in controller.finished((), 0.0)
        if isinstance(one, Dispatch)
    }
    assert found["before"] == (0, 1)
    assert "long" not in found
    assert found["short"] == (2,)
    assert found.get("degree") != (0, 1)
    controller.state.loads.remove(controller.state.loads[(0, 1)].requests["1"])
    assert [(one.request_id, one.group) for one in controller.finished((), 0.0)][:1] == [
        ("long", (0, 1))
    ]
