"""The policies: pure functions of a snapshot. `auto` composes the three use cases; others are parts of it or fixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from flying_serving.layout.groups import Layout
from flying_serving.policy import switching
from flying_serving.policy.snapshot import Decision, Need, Snapshot
from flying_serving.predict.forecast import capacity, judge
from flying_serving.predict.work import Weights

MARGIN = 0.05
"""A switch for load has to gain this share of what staying would cost, beside its cost."""
ABOUT = 1.25
"""Layouts whose predicted costs differ by less than this factor are about as good."""
HARDER = 3.0
"""Factor of that margin for each recent switch for load, less the longer ago that was, unless the new layout
gets prompts done faster: at the crossover the server comes to rest where it has the most capacity; no burst waits."""


@dataclass(frozen=True)
class Policy:
    """Which reasons to switch a server knows.

    Args:
        name: as in `--policy`.
        by_load, by_priority, by_context: the use cases that it decides by.
        pinned_size: group size of a fixed layout, as a function of the sizes that there are; None if it may change.
    """

    name: str
    by_load: bool = False
    by_priority: bool = False
    by_context: bool = False
    pinned_size: Callable[[Sequence[int]], int] | None = None

    def decide(self, snapshot: Snapshot, weights: Weights) -> Decision | None:
        """The change that is worth its cost, or None."""
        needs = [need for need in snapshot.needs if (self.by_priority if need.urgent else self.by_context)]
        if needs and not meets(snapshot.layout, needs):
            return _provide(snapshot, needs, weights)
        if self.by_load:
            return _improve(snapshot, needs, weights)
        if (self.by_priority or self.by_context) and not self.by_load and not needs:
            return _return_to(snapshot, Layout.uniform(sum(map(len, snapshot.layout.groups)), 1), weights)
        return None

    def catches_up(self, snapshot: Snapshot, weights: Weights) -> bool:
        """Whether requests that an older layout has left had better go on in the present one than be woven in.

        A switch may leave them for prompts that their group has begun; when those are done they move cheaply. While a
        request is urgent nobody comes into its way.
        """
        decides = self.by_load or self.by_priority or self.by_context
        if not decides or (self.by_priority and any(need.urgent for need in snapshot.needs)):
            return False
        return switching.at_once(snapshot, snapshot.layout, weights) == "migrate"


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("auto", by_load=True, by_priority=True, by_context=True),
        Policy("load", by_load=True),
        Policy("priority", by_priority=True),
        Policy("context", by_context=True),
        Policy("static-dp", pinned_size=min),
        Policy("static-tp", pinned_size=max),
        Policy("manual"),
    )
}


def meets(layout: Layout, needs: Sequence[Need]) -> bool:
    """Whether the layout has a group for each need; a group may serve several."""
    return all(need.least_size <= layout.widest for need in needs)


def _shapes(snapshot: Snapshot, needs: Sequence[Need]) -> list[Layout]:
    """For all sizes of groups, the layout that meets the needs and has the fewest requests to leave behind."""
    best: dict[tuple[int, ...], tuple[int, Layout]] = {}
    for layout in snapshot.layouts:
        if meets(layout, needs):
            old = sum(load.requests for load in switching.leaving(snapshot, layout).values())
            if layout.shape not in best or old < best[layout.shape][0]:
                best[layout.shape] = (old, layout)
    return [layout for _, layout in best.values()]


def _provide(snapshot: Snapshot, needs: Sequence[Need], weights: Weights) -> Decision:
    """The layout that meets the needs and is best otherwise; a request waits for it, so no margin is asked for.

    How to switch for an urgent request is chosen for its sake: as if no others came.
    """
    urgent = any(need.urgent for need in needs)
    lanes, work = snapshot.lanes, snapshot.work
    needy = replace(snapshot, work=replace(work, rate=0.0, waiting=1.0, begun=0.0)) if urgent else snapshot
    judged = {layout: judge(layout, lanes, work, weights) for layout in _shapes(snapshot, needs)}
    best: tuple[float, Layout, dict[str, float]] | None = None
    for layout in sorted(judged, key=judged.__getitem__):
        if best is not None and judged[layout] >= best[0]:
            break
        considered = switching.costs(needy, layout, weights, urgent=urgent, there=judged[layout])
        total = judged[layout] + min(considered.values())
        if best is None or total < best[0]:
            best = (total, layout, considered)
    assert best is not None
    _, layout, considered = best
    return _decision(snapshot, layout, "; ".join(sorted({need.reason for need in needs})), math.inf, considered)


def _decision(
    snapshot: Snapshot,
    layout: Layout,
    reason: str,
    gain: float,
    considered: dict[str, float],
    stay: float | None = None,
) -> Decision:
    """Go there in the cheapest way."""
    mode = min(considered, key=considered.__getitem__)
    drain_s = switching.drain_s(snapshot, layout)
    return Decision(layout, mode, reason, gain, considered[mode], considered, stay, drain_s)


def _improve(snapshot: Snapshot, needs: Sequence[Need], weights: Weights) -> Decision | None:
    """Wide when quiet, narrow under load: whatever is predicted to be better by more than it costs."""
    lanes, work, present = snapshot.lanes, snapshot.work, snapshot.layout
    stay = judge(present, lanes, work, weights)
    # who is alone gains nothing by narrow groups, and one arrival says little of how many will follow
    alone = not work.waiting and sum(load.requests for load in snapshot.loads.values()) == 1
    least = present.widest if alone else 1
    layouts = [one for one in _shapes(snapshot, needs) if one.shape != present.shape and one.widest >= least]
    judged = {one: judge(one, lanes, work, weights) for one in layouts if one.is_uniform}
    # a mixed layout is between two of these: it is better than both only if they are about as good
    uniform = judged | ({present: stay} if present.is_uniform else {})
    good = {one.widest for one in uniform if uniform[one] <= ABOUT * min(uniform.values())}
    mixed = [one for one in layouts if not one.is_uniform and (not uniform or good.issuperset(one.shape))]
    judged |= {one: judge(one, lanes, work, weights) for one in mixed}
    layout = min(judged, key=judged.__getitem__, default=present)
    gain = stay - judged.get(layout, stay)
    if gain <= MARGIN * stay:
        return None
    slower = capacity(layout, lanes, work) <= capacity(present, lanes, work)
    if slower and snapshot.came_back:  # leaving it did not last
        return None
    least_gain = margin(stay, snapshot, slower=slower)
    if gain <= least_gain:
        return None
    considered = switching.costs(snapshot, layout, weights, urgent=False, there=judged[layout])
    if gain <= min(considered.values()) + least_gain:
        return None
    reason = f"load: {work.rate:.2f} requests/s, {work.waiting:.0f} waiting"
    if _not_yet(considered):
        return None
    return replace(_decision(snapshot, layout, reason, gain, considered, stay), slower=slower)


def margin(stay: float, snapshot: Snapshot, *, slower: bool) -> float:
    """What a switch for load has to gain beside its cost, if staying costs `stay` request-seconds."""
    return MARGIN * stay * (HARDER**snapshot.recent_switches if slower else 1.0)


def _not_yet(considered: Mapping[str, float]) -> bool:
    """Whether it is best to wait for requests that only the present groups hold."""
    return min(considered, key=considered.__getitem__) == switching.LATER


def _return_to(snapshot: Snapshot, layout: Layout, weights: Weights) -> Decision | None:
    """Back to what there is when nobody needs a group."""
    if layout == snapshot.layout:
        return None
    considered = switching.costs(snapshot, layout, weights, urgent=False)
    return None if _not_yet(considered) else _decision(snapshot, layout, "no request needs a group", 0.0, considered)
