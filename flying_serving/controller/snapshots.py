"""The policy's view of the state."""

from collections.abc import Mapping

from flying_serving.controller.required_groups import required_groups
from flying_serving.controller.state import ClusterState
from flying_serving.policy.snapshot import Snapshot
from flying_serving.predict.work import LaneFigures


def snapshot(state: ClusterState, lanes: Mapping[int, LaneFigures], now_s: float) -> Snapshot:
    """Return the state at `now_s`; `lanes`: the abilities of a group of each size."""
    loads, lending, pool = state.loads, state.lending, state.pool
    unfinished = loads.unfinished.values()

    # the part of a split request is unfinished too
    streaming = state.running + len(state.splits) - len(unfinished)
    prefill_tokens = sum(request.prefill_tokens for request in unfinished)
    work = state.demand.work(len(pool), prefill_tokens, streaming, now_s)

    pinned = lending.pinned(loads)
    layouts = state.layouts
    if pinned:
        layouts = [layout for layout in layouts if pinned.issubset(layout.groups)]

    first = pool.first(now_s)
    begins = [*unfinished] if first is None else [first, *unfinished]
    urgent = pool.urgent + sum(loads[group].urgent for group in loads.groups)
    needs = required_groups(
        begins, urgent, state.formable, state.settings.engines, lending.needs_loan
    )

    return Snapshot(
        now_s,
        state.layout,
        layouts,
        lanes,
        loads.as_seen(state.demand.outputs),
        work,
        needs,
        promised=state.switches.promised(state.settings.objective.horizon_s, now_s),
        opens_in_s=lending.opens_in_s(now_s),
    )
