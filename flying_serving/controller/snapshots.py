"""The policy's view of the state."""

from collections import Counter
from collections.abc import Mapping, Sequence

from flying_serving.controller.requests import RequestState
from flying_serving.controller.state import ClusterState
from flying_serving.policy.snapshot import Need, Snapshot
from flying_serving.predict.work import LaneFigures


def snapshot(
    state: ClusterState, lanes: Mapping[int, LaneFigures], now_s: float, regret: float = 0.0
) -> Snapshot:
    """Return the state at `now_s`; `lanes`: the abilities of a group of each size; `regret` as in
    `Snapshot`.
    """
    loads, rooms, pool = state.loads, state.rooms, state.pool
    pinned = rooms.pinned()
    layouts = state.layouts
    if pinned:
        layouts = [layout for layout in layouts if pinned.issubset(layout.groups)]

    begins = [*_next_requests(state, now_s), *loads.unfinished.values()]
    urgent = pool.urgent + sum(loads[group].urgent for group in loads.groups)

    return Snapshot(
        now_s,
        state.layout,
        layouts,
        lanes,
        loads.as_seen(state.demand.outputs),
        state.work(now_s),
        required_groups(state, begins, urgent),
        promised=state.switches.promised(state.settings.objective.horizon_s, now_s),
        regret=regret,
        recent_switches=state.switches.recent(now_s),
        shortfalls=state.hindsight.shortfalls(now_s),
        opens_in_s=state.weight_lending.opens_in_s(now_s),
    )


def _next_requests(state: ClusterState, now_s: float) -> list[RequestState]:
    """Return the request whose turn it is. Where engines join for long requests alone, these do not
    wait for shorter ones: return the first of each kind then.
    """
    if state.settings.policy.joins_for_long:
        return state.pool.first_of_each_kind()
    first = state.pool.first(now_s)
    return [] if first is None else [first]


def required_groups(state: ClusterState, begins: Sequence[RequestState], urgent: int) -> list[Need]:
    """Return the groups that some request cannot do without: for room, or because it is urgent.

    A long request needs its group from when it is its turn until its prompt is done. Then the group
    may drain, or it is kept until the request ends (`policy.snapshot.LATER`). While requests wait
    that came before it, it could not begin there. An urgent request needs a group until it ends:
    the widest that leaves engines to others, or the widest there is. No group can be required whose
    size cannot be formed now.

    Args:
        begins: the requests whose turn it is, and requests whose prompts are not done.
        urgent: the number of urgent requests.
    """
    sizes, engines = state.formable, state.settings.engines
    needs_extra = state.rooms.needs_extra
    needs = []

    # only a group of the layout gets extra room, also for a request for a degree
    least_sizes = [
        request.sizes[0]
        for request in begins
        if request.spec.degree is None or needs_extra(request)
    ]
    longest = max(filter(sizes.__contains__, least_sizes), default=sizes[0])
    if longest > sizes[0]:
        reason = f"context: a request needs {longest} engines"
        lends = any(map(needs_extra, begins))
        needs.append(Need(longest, urgent=False, reason=reason, lends=lends))

    needs += _crowded_out(state)

    if urgent:
        leaving_room = [size for size in sizes if size <= engines // 2]
        size = leaving_room[-1] if engines > 2 and leaving_room else sizes[-1]
        reason = f"priority: {urgent} urgent requests"
        needs.append(Need(size, urgent=True, reason=reason, waiting=state.pool.urgent))
    return needs


def _crowded_out(state: ClusterState) -> list[Need]:
    """Return the needs of long requests that wait for another group, one for each least size."""
    if not state.crowded_out:
        return []
    counts = Counter(
        request.sizes[0]
        for request in state.pool
        if request.spec.degree is None
        and request.sizes in state.crowded_out
        and request.sizes[0] in state.formable
    )
    return [
        Need(
            size,
            urgent=False,
            reason=f"context: no room for {count} requests of {size} engines beside others",
            crowded_out=count,
        )
        for size, count in sorted(counts.items())
    ]
