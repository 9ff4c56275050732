"""Aligned groups, layouts and world ranks."""

import json
from itertools import combinations

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from flying_serving.errors import LayoutError
from flying_serving.layout.groups import (
    Group,
    Layout,
    aligned_group,
    group_world_ranks,
    is_power_of_two,
    world_rank,
)
from harness.examples import examples

COUNTS = st.sampled_from([1, 2, 4, 8])
SIZES = [1, 2, 4, 8]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Draw a number of engines and a partition of them into aligned groups, halved at will."""
    engines = draw(COUNTS)

    def split(group: list[int]) -> list[list[int]]:
        if len(group) == 1 or draw(st.booleans()):
            return [group]
        half = len(group) // 2
        return split(group[:half]) + split(group[half:])

    return engines, split(list(range(engines)))


def every_group(engines: int) -> list[Group]:
    """Return each aligned group of so many engines."""
    return [
        group for size in SIZES if size <= engines for group in Layout.uniform(engines, size).groups
    ]


@given(st.integers(-10, 5000))
def test_power_of_two(value: int) -> None:
    """What has one bit set."""
    assert is_power_of_two(value) == (value > 0 and bin(value).count("1") == 1)


@given(engine=st.integers(0, 7), size=COUNTS)
def test_an_engine_is_in_one_group_of_each_size(engine: int, size: int) -> None:
    """And each of its members names the same one."""
    group = aligned_group(engine, size)
    assert engine in group
    assert len(group) == size
    assert group[0] % size == 0
    assert {aligned_group(member, size) for member in group} == {group}


def test_two_groups_are_apart_or_one_holds_the_other() -> None:
    """So that groups that meet do so at all members of the smaller one."""
    for one, other in combinations(every_group(8), 2):
        common = set(one) & set(other)
        assert not common or common in (set(one), set(other))


@given(layouts(), st.randoms(use_true_random=False))
def test_a_partition_is_read_in_any_order(
    drawn: tuple[int, list[list[int]]], random: object
) -> None:
    """Groups and members may come shuffled; what comes out is sorted, and JSON gives it back."""
    engines, groups = drawn
    shuffled = [random.sample(group, len(group)) for group in random.sample(groups, len(groups))]  # type: ignore[attr-defined]
    layout = Layout.parse(shuffled, engines, SIZES)
    assert layout.to_lists() == groups
    assert Layout.parse(json.loads(json.dumps(layout.to_lists())), engines, SIZES) == layout
    assert hash(Layout.parse(tuple(map(tuple, groups)), engines, SIZES)) == hash(layout)
    for engine in range(engines):
        assert engine in layout.group_of(engine)
        assert list(layout.group_of(engine)) in groups


@settings(max_examples=examples(300))
@given(
    engines=COUNTS,
    groups=st.lists(st.lists(st.integers(-1, 8), max_size=4), max_size=5),
    sizes=st.sets(st.sampled_from(SIZES)).map(sorted),
)
@example(engines=4, groups=[[0, 0], [2, 3]], sizes=[1, 2])
@example(engines=4, groups=[[1, 2], [0], [3]], sizes=[1, 2])
@example(engines=4, groups=[[1, 0], [2], [3]], sizes=[1, 2])
def test_exactly_the_partitions_are_accepted(
    engines: int, groups: list[list[int]], sizes: list[int]
) -> None:
    """Whatever lists of numbers come: a layout if they are a partition into aligned groups of
    allowed sizes.
    """
    valid = (
        bool(groups)
        and sorted(e for group in groups for e in group) == list(range(engines))
        and all(
            len(group) in sizes and sorted(group) == list(aligned_group(min(group), len(group)))
            for group in groups
        )
    )
    if valid:
        assert Layout.parse(groups, engines, sizes).to_lists() == sorted(
            sorted(group) for group in groups
        )
    else:
        with pytest.raises(LayoutError, match=r"^groups"):
            Layout.parse(groups, engines, sizes)


@pytest.mark.parametrize(
    ("groups", "field", "allowed"),
    [
        ([], "groups", "non-empty list of lists"),
        (None, "groups", "non-empty list of lists"),
        ("0,1", "groups", "non-empty list of lists"),
        ({"0": 1}, "groups", "non-empty list of lists"),
        ([0, 1, 2, 3], "groups[0]", "non-empty list of engine numbers"),
        ([[0, 1], []], "groups[1]", "non-empty list of engine numbers"),
        ([[0, 1], "23"], "groups[1]", "non-empty list of engine numbers"),
        ([[0, 1], [2, 4]], "groups[1]", "engine 4 is not one of 0..3"),
        ([[-1, 0]], "groups[0]", "engine -1 is not one of 0..3"),
        ([[0, True], [2, 3]], "groups[0]", "engine True is not one of 0..3"),
        ([[0.0, 1], [2, 3]], "groups[0]", "engine 0.0 is not one of 0..3"),
        ([[[0], 1], [2, 3]], "groups[0]", "engine [0] is not one of 0..3"),
        ([["0"], [1], [2], [3]], "groups[0]", "engine '0' is not one of 0..3"),
        ([[0, 1, 2], [3]], "groups[0]", "group size 3 is not one of [1, 2]"),
        ([[0, 1, 2, 3]], "groups[0]", "group size 4 is not one of [1, 2]"),
        ([[0], [1, 2], [3]], "groups[1]", "aligned and contiguous, like [0, 1]"),
        ([[0, 2], [1, 3]], "groups[0]", "aligned and contiguous, like [0, 1]"),
        ([[0, 0], [2, 3]], "groups[0]", "aligned and contiguous, like [0, 1]"),
        ([[0, 1], [1], [2, 3]], "groups", "engine 1 is in more than one group"),
        ([[0, 1], [2]], "groups", "engine 3 is in no group"),
    ],
)
def test_refused_layout_is_named_by_field_and_value(
    groups: object, field: str, allowed: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(groups, 4, [1, 2])
    assert caught.value.field == field
    assert allowed in caught.value.allowed
    assert str(caught.value) == f"{field}={caught.value.value!r}: {caught.value.allowed}"


@given(engines=COUNTS, size=COUNTS)
def test_a_uniform_layout_is_a_partition(engines: int, size: int) -> None:
    """Into groups of one size, which `parse` accepts."""
    assume(size <= engines)
    layout = Layout.uniform(engines, size)
    assert Layout.parse(layout.to_lists(), engines, [size]) == layout
    assert str(Layout.uniform(4, 2)) == "{0,1}+{2,3}"


@given(engines=COUNTS, devices=st.integers(1, 4))
def test_every_device_has_its_own_world_rank(engines: int, devices: int) -> None:
    """And the ranks of the groups of a size are a partition of the world."""
    world = list(range(engines * devices))
    assert (
        sorted(world_rank(e, d, engines) for e in range(engines) for d in range(devices)) == world
    )
    for size in [size for size in SIZES if size <= engines]:
        ranks = [
            group_world_ranks(group, devices, engines)
            for group in Layout.uniform(engines, size).groups
        ]
        assert sorted(rank for group in ranks for rank in group) == world


@given(engines=COUNTS, devices=st.integers(1, 4), data=st.data())
def test_rank_device_p_plus_e_is_device_of_the_groups_engine_e(
    engines: int, devices: int, data: st.DataObject
) -> None:
    """Ranks increase, as torch wants them, and cut a device's own shard."""
    group = data.draw(st.sampled_from(every_group(engines)))
    ranks = group_world_ranks(group, devices, engines)
    assert ranks == sorted(ranks)
    for device in range(devices):
        for place, engine in enumerate(group):
            assert ranks[device * len(group) + place] == world_rank(engine, device, engines)


@given(layouts(), st.data())
def test_engines_that_are_lost_leave_their_members_alone(
    drawn: tuple[int, list[list[int]]], data: st.DataObject
) -> None:
    """Groups without one stay; what an operator orders then names those that are there, and no
    other.
    """
    engines, groups = drawn
    layout = Layout.parse(groups, engines, SIZES)
    lost = data.draw(st.sets(st.integers(0, engines - 1), max_size=engines - 1))
    left = layout.without(lost)
    assert left.engines == set(range(engines)) - lost
    for group in left.groups:
        assert group in layout.groups or len(group) == 1
    assert {group for group in layout.groups if lost.isdisjoint(group)} <= set(left.groups)
    assert left.apart().groups == tuple((engine,) for engine in sorted(left.engines))
    absent = dict.fromkeys(lost, "is away")
    assert Layout.parse(left.to_lists(), engines, SIZES, absent) == left
    assert left.without(lost) == left
    if lost:
        with pytest.raises(LayoutError, match=f"engine {min(lost)} is away"):
            Layout.parse(layout.to_lists(), engines, SIZES, absent)
