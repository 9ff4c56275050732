"""The ranks from which each rank reads its heads, for any pair of groups: pure."""

from collections.abc import Iterator

from flying_serving.layout.groups import Group
from flying_serving.memory.kv_view import heads_of

Place = tuple[int, int]
"""An engine and a device of it."""


def rank_of(group: Group, place: Place) -> int:
    """Return the rank of a device in a group."""
    engine, device = place
    return device * len(group) + engine - group[0]


def copies(
    source: Group, target: Group, reader: Place, devices: int, kv_heads: int
) -> Iterator[tuple[Place, range]]:
    """Yield the places from which a device of `target` reads the heads that it works with.

    Each head comes from the nearest device that has it. `devices`: of each engine. Yields places in
    `source`, and runs of the model's heads.
    """
    degree = devices * len(source)
    holders = {
        (engine, device): heads_of(rank_of(source, (engine, device)), degree, kv_heads)
        for device in range(devices)
        for engine in source
    }
    nearest = sorted(
        holders, key=lambda place: (abs(place[0] - reader[0]), abs(place[1] - reader[1]), place)
    )
    needed = heads_of(rank_of(target, reader), devices * len(target), kv_heads)
    head = needed.start
    while head < needed.stop:
        place = next(place for place in nearest if head in holders[place])
        stop = min(needed.stop, holders[place].stop)
        yield place, range(head, stop)
        head = stop
