"""Aligned groups of engines, layouts made of them, and KV that a group offers to others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from flying_serving.errors import LayoutError

Group = tuple[int, ...]


def is_power_of_two(value: int) -> bool:
    """Return whether value is 1, 2, 4, ..."""
    return value > 0 and value & (value - 1) == 0


def aligned_group(engine: int, size: int) -> Group:
    """Return the only group of `size` engines that holds `engine`."""
    first = engine - engine % size
    return tuple(range(first, first + size))


def world_rank(engine: int, device: int, engines: int) -> int:
    """Return the rank of an engine's device in the torch world of all engines.

    Devices come first, engines second: a group's ranks in increasing order are ordered by (device,
    engine). Rank device*p + e of a group of p engines then takes part e of p of its own device's
    shard.
    """
    return device * engines + engine


def group_world_ranks(group: Group, devices: int, engines: int) -> list[int]:
    """Return the world ranks of a group in the order of its tensor-parallel ranks, increasing."""
    return [world_rank(e, d, engines) for d in range(devices) for e in group]


@dataclass(frozen=True)
class KVSource:
    """The KV of one request in a group, whose leader offers it under this number to other groups.

    The number is unique in the life of the server.
    """

    group: Group
    number: int


@dataclass(frozen=True)
class Layout:
    """A partition of engines into aligned groups, by first engine. The engines are 0..n-1 without
    the lost ones.
    """

    groups: tuple[Group, ...]

    @cached_property
    def engines(self) -> frozenset[int]:
        """The engines that are in a group."""
        return frozenset(engine for group in self.groups for engine in group)

    def without(self, engines: Collection[int]) -> Layout:
        """Return the layout without some engines; the other members of their groups are alone."""
        groups: list[Group] = []
        for group in self.groups:
            left = [engine for engine in group if engine not in engines]
            groups += [group] if len(left) == len(group) else [(engine,) for engine in left]
        return Layout(tuple(groups))

    def beside(self, engine: int) -> Layout:
        """Return the layout with an engine alone beside the groups, if it is in none of them."""
        return self if engine in self.engines else Layout(tuple(sorted((*self.groups, (engine,)))))

    def apart(self) -> Layout:
        """Return the layout of the same engines, each alone."""
        return Layout(tuple((engine,) for engine in sorted(self.engines)))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the groups, the narrowest first."""
        return tuple(sorted(map(len, self.groups)))

    @property
    def is_uniform(self) -> bool:
        """True if all groups are of one size."""
        return self.shape[0] == self.shape[-1]

    @classmethod
    def uniform(cls, engines: int, size: int) -> Layout:
        """Return the layout of all engines in groups of `size`."""
        return cls(tuple(aligned_group(e, size) for e in range(0, engines, size)))

    @classmethod
    def all(cls, engines: int, sizes: Sequence[int]) -> list[Layout]:
        """Return every partition into aligned groups of these sizes, narrow ones first."""

        def partitions(first: int, size: int) -> list[tuple[Group, ...]]:
            halves: list[tuple[Group, ...]] = []
            if size > 1:
                half = size // 2
                right = partitions(first + half, half)
                halves = [a + b for a in partitions(first, half) for b in right]
            whole = aligned_group(first, size)
            return [*halves, (whole,)] if size in sizes else halves

        return [cls(groups) for groups in partitions(0, engines)]

    @classmethod
    def parse(
        cls,
        groups: object,
        engines: int,
        sizes: Sequence[int],
        absent: Mapping[int, str] | None = None,
    ) -> Layout:
        """Parse the `groups` that a client sent: every engine that is not absent, and no other.

        `absent`: engines that no layout has now, each with the reason, for errors.

        Raises LayoutError, naming the field, the value and what is allowed.
        """
        if not isinstance(groups, list | tuple) or not groups:
            raise LayoutError(
                "groups", groups, "must be a non-empty list of lists of engine numbers"
            )
        parsed = [_parse_group(index, group, engines, sizes) for index, group in enumerate(groups)]
        _check_partition(parsed, engines, absent or {})
        return cls(tuple(sorted(parsed)))

    def group_of(self, engine: int) -> Group:
        """Return the group that holds `engine`."""
        return next(group for group in self.groups if engine in group)

    @property
    def widest(self) -> int:
        """Engines in its widest group; 0 if no engine is there."""
        return max(self.shape, default=0)

    def to_lists(self) -> list[list[int]]:
        """Return the layout in JSON form, a list of lists of engines."""
        return [list(group) for group in self.groups]

    def __str__(self) -> str:
        return "+".join("{" + ",".join(map(str, group)) + "}" for group in self.groups)


def _parse_group(index: int, group: object, engines: int, sizes: Sequence[int]) -> Group:
    field = f"groups[{index}]"
    if not isinstance(group, list | tuple) or not group:
        raise LayoutError(field, group, "must be a non-empty list of engine numbers")
    for engine in group:
        if isinstance(engine, bool) or not isinstance(engine, int) or not 0 <= engine < engines:
            raise LayoutError(field, group, f"engine {engine!r} is not one of 0..{engines - 1}")
    members = tuple(sorted(group))
    if len(members) not in sizes:
        raise LayoutError(field, group, f"group size {len(members)} is not one of {list(sizes)}")
    expected = aligned_group(members[0], len(members))
    if members != expected:
        raise LayoutError(field, group, f"groups are aligned and contiguous, like {list(expected)}")
    return members


def _check_partition(groups: Iterable[Group], engines: int, absent: Mapping[int, str]) -> None:
    flat = [engine for group in groups for engine in group]
    twice = sorted({engine for engine in flat if flat.count(engine) > 1})
    if twice:
        raise LayoutError(
            "groups", [list(g) for g in groups], f"engine {twice[0]} is in more than one group"
        )
    named = sorted(absent.keys() & set(flat))
    if named:
        why = f"engine {named[0]} {absent[named[0]]}"
        raise LayoutError("groups", [list(g) for g in groups], why)
    missing = sorted(set(range(engines)) - absent.keys() - set(flat))
    if missing:
        raise LayoutError(
            "groups",
            [list(g) for g in groups],
            f"engine {missing[0]} is in no group; name every engine",
        )
