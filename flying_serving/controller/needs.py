"""Groups that some request cannot do without: for room (use case 3), or because it is urgent (use case 2)."""

from collections.abc import Sequence

from flying_serving.controller.loads import Loads
from flying_serving.controller.pool import TaskPool
from flying_serving.policy.snapshot import Need


def needs_of(pool: TaskPool, loads: Loads, sizes: Sequence[int], engines: int, now_s: float) -> list[Need]:
    """What the layout must have now.

    A long request needs its group from when it is its turn until its prompt is done: then the group may drain, or is
    kept to its end (`switching.LATER`). While others wait that came before it, it could not begin there. An urgent one
    needs it to its end.
    """
    needs = []
    first = pool.first(now_s)
    begins = loads.unfinished() if first is None else [first, *loads.unfinished()]
    longest = max((one.sizes[0] for one in begins if one.spec.degree is None), default=sizes[0])
    if longest > sizes[0]:
        needs.append(Need(longest, urgent=False, reason=f"context: a request needs {longest} engines"))
    urgent = pool.urgent + sum(loads[group].urgent for group in loads.groups)
    if urgent:
        needs.append(Need(_urgent_size(sizes, engines), urgent=True, reason=f"priority: {urgent} urgent requests"))
    return needs


def _urgent_size(sizes: Sequence[int], engines: int) -> int:
    """The widest group that leaves engines to everyone else, or the widest there is."""
    leaving_room = [size for size in sizes if size <= engines // 2]
    return leaving_room[-1] if engines > 2 and leaving_room else sizes[-1]
