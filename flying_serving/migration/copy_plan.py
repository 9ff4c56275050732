"""The ranks from which each rank reads its heads, for any pair of groups: pure."""

from collections.abc import Iterator

from flying_serving.layout.groups import Group
from flying_serving.memory.kv_view import heads_of

WorkerId = tuple[int, int]
"""A worker: its engine, and its device there."""


def rank_of(group: Group, worker: WorkerId) -> int:
    """Return the rank of a worker in a group."""
    engine, device = worker
    return device * len(group) + engine - group[0]


def copies(
    source: Group, target: Group, reader: WorkerId, devices: int, kv_heads: int
) -> Iterator[tuple[WorkerId, range]]:
    """Yield the workers from which a worker of `target` reads the heads that it works with.

    Each head comes from the nearest worker that has it. `devices`: of each engine. Yields workers
    of `source`, and runs of the model's heads.
    """
    degree = devices * len(source)
    holders = {
        (engine, device): heads_of(rank_of(source, (engine, device)), degree, kv_heads)
        for device in range(devices)
        for engine in source
    }
    nearest = sorted(
        holders, key=lambda worker: (abs(worker[0] - reader[0]), abs(worker[1] - reader[1]), worker)
    )
    needed = heads_of(rank_of(target, reader), devices * len(target), kv_heads)
    head = needed.start
    while head < needed.stop:
        worker = next(worker for worker in nearest if head in holders[worker])
        stop = min(needed.stop, holders[worker].stop)
        yield worker, range(head, stop)
        head = stop
