"""Gyges' scheduler of transformations (arXiv 2509.19729, section 5): which engines join for a long
request, and when a group parts.

A request is *long* if one engine cannot hold it. The end of algorithm 1 (`execute_scale_up`) is
`_join`, algorithm 2 (`schedule_parallelism`) is `_part`. The rest of algorithm 1 chooses groups:
`controller.reserving_choice`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from flying_serving.layout.groups import Group, Layout
from flying_serving.policy import switching
from flying_serving.policy.ranking import Ranking
from flying_serving.policy.snapshot import LATER, Decision, Need, Snapshot
from flying_serving.policy.switching import DrainingGroup
from flying_serving.predict.work import Objective

PART_BELOW = 0.5
"""A group parts only if its requests need no more than this share of its engines' KV memory.

The paper's `THRESHOLD`, which it does not give. Its engines share the requests, and none may fill
its memory.
"""


def decide(snapshot: Snapshot, objective: Objective, *, has_price: bool = True) -> Decision | None:
    """Return the switch that lets engines join for a long request, or a group part which no request
    needs. None if there is neither.

    `has_price`: False if one more group is made at any cost.
    """
    unmet = [
        need for need in snapshot.needs if not need.urgent and _is_unmet(need, snapshot.layout)
    ]
    if not unmet:
        return _part(snapshot, objective)
    found = None
    for least_size in sorted({need.least_size for need in unmet}, reverse=True):
        served = [need for need in unmet if need.least_size <= least_size]
        joining = _join(snapshot, served, objective, has_price=has_price)
        if joining is not None and joining.is_made:
            return joining
        found = found or joining
    return found


def joined(snapshot: Snapshot) -> list[Layout]:
    """Return the layouts that may be chosen and split no group of the present one."""
    return [
        layout
        for layout in snapshot.layouts
        if all(set(group) <= set(layout.group_of(group[0])) for group in snapshot.layout.groups)
    ]


def _is_unmet(need: Need, layout: Layout) -> bool:
    """Return whether a long request needs engines to join: no group is wide enough, or those that
    are have no room beside other long requests.
    """
    return need.least_size > layout.widest or need.crowded_out > 0


def _join(
    snapshot: Snapshot, needs: Sequence[Need], objective: Objective, *, has_price: bool
) -> Decision | None:
    """Return the switch that makes one more group for long requests. All such layouts are
    compared, with the cost of the switch and what the layout is worth afterwards.

    It is made at any cost if no group is wide enough. One more group has a price: requests that
    wait for room in a wide one have to lose more than all lose by the switch. None if no engines
    are left to join.
    """
    least_size = max(need.least_size for need in needs)
    layouts = [layout for layout in joined(snapshot) if _adds(snapshot.layout, layout, least_size)]
    if not layouts:
        return None
    figures, considered = _compared(snapshot, layouts, objective)
    best = min(layouts, key=lambda layout: figures[layout] + min(considered[layout].values()))
    reason = "; ".join(sorted({need.reason for need in needs}))
    found = switching.decision(snapshot, best, reason, math.inf, considered[best])
    found = replace(found, predicted=figures)
    if least_size > snapshot.layout.widest or not has_price:
        return found
    waiting_s = min(_wait_s(snapshot, least_size), objective.horizon_s)
    loses = figures[best] - figures[snapshot.layout] + 2 * found.cost
    waiting = sum(need.crowded_out for need in needs)
    return replace(found, gain=waiting * waiting_s, least_gain=max(0.0, loses))


def _compared(
    snapshot: Snapshot, layouts: Sequence[Layout], objective: Objective
) -> tuple[dict[Layout, float], dict[Layout, dict[str, float]]]:
    """Return the figure of the present layout and of others, and the costs of the switch to each of
    these by mode, but for waiting until long requests have ended.
    """
    ranking = Ranking.of([snapshot.layout, *layouts], snapshot, objective)
    figures, measure = ranking.figures(), ranking.measure
    considered = {
        layout: switching.costs(
            snapshot, layout, objective, measure, urgent=False, figure=figures[layout]
        )
        for layout in layouts
    }
    for modes in considered.values():
        modes.pop(LATER, None)
    return figures, considered


def _wait_s(snapshot: Snapshot, least_size: int) -> float:
    """Return the seconds until a long request ends in a group of at least `least_size` engines."""
    waits_s = [math.inf]
    for group, load in snapshot.loads.items():
        if len(group) >= least_size and load.by_least_size:
            long = load.by_least_size[2]
            ends = DrainingGroup.of(snapshot, group, load)
            waits_s.append((ends.prefill_s + long.tokens_left * ends.step_s) / long.requests)
    return min(waits_s)


def _adds(present: Layout, layout: Layout, least_size: int) -> bool:
    """Return whether a layout has one group more than the present one, of at least `least_size`
    engines.
    """
    new = [group for group in layout.groups if group not in present.groups]
    return len(new) == 1 and len(new[0]) >= least_size


def _part(snapshot: Snapshot, objective: Objective) -> Decision | None:
    """Return the switch after which the engines of a group are alone, None if no group may part.

    It is the group with the least load of those without a long request, and without which no need
    is unmet.
    """
    narrowest = min(snapshot.lane_figures)
    shares = {
        group: _share(snapshot, group)
        for group in snapshot.layout.groups
        if len(group) > narrowest and _may_part(snapshot, group)
    }
    group = min(shares, key=shares.__getitem__, default=())
    if not group or shares[group] > PART_BELOW:
        return None

    layout = _parted(snapshot.layout, group)
    figures, considered = _compared(snapshot, [layout], objective)
    reason = (
        f"no long request in group {list(group)}, whose requests need {shares[group]:.0%} of its "
        f"engines' memory"
    )
    gain = figures[snapshot.layout] - figures[layout]
    found = switching.decision(snapshot, layout, reason, gain, considered[layout])
    return replace(found, predicted=figures)


def _may_part(snapshot: Snapshot, group: Group) -> bool:
    """Return whether a group runs no long and no urgent request, and no need asks for it. An urgent
    request that runs elsewhere asks for none.
    """
    load = snapshot.loads.get(group)
    if load is not None and (load.by_least_size or load.urgent):
        return False
    layout = _parted(snapshot.layout, group)
    is_asked_for = any(
        need.waiting or need.crowded_out or (need.least_size > layout.widest and not need.urgent)
        for need in snapshot.needs
    )
    return layout in snapshot.layouts and not is_asked_for


def _share(snapshot: Snapshot, group: Group) -> float:
    """Return the share of its engines' KV memory that the requests of a group need at their end, if
    the engines were alone.
    """
    load = snapshot.loads.get(group)
    if load is None:
        return 0.0
    figures = snapshot.lane_figures
    return load.booked_tokens / (len(group) * figures[min(figures)].kv_tokens)


def _parted(layout: Layout, group: Group) -> Layout:
    """Return the layout in which the engines of a group are alone."""
    others = [other for other in layout.groups if other != group]
    return Layout(tuple(sorted([*others, *((engine,) for engine in group)])))
