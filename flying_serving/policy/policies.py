"""The policies: pure functions of a snapshot. `auto` composes the three use cases; others are parts of it or fixed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flying_serving.layout.groups import Layout
from flying_serving.policy import switching
from flying_serving.policy.forecast import Weights, capacity, judge
from flying_serving.policy.snapshot import Decision, Need, Snapshot

MARGIN = 0.05
"""A switch for load has to gain this share of what staying would cost, beside its cost."""
CAUTION = 3.0
"""It has to gain its cost so many times: what it costs is certain, and what looks like a burst may be over at once."""
HARDER = 3.0
"""For each switch for load in the last minute that margin grows so many times, unless the new layout gets prompts done
faster: at the crossover the server comes to rest where it has the most capacity, and a burst is never kept waiting."""


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


def _provide(snapshot: Snapshot, needs: Sequence[Need], weights: Weights) -> Decision:
    """The layout that meets the needs and is best otherwise; a request waits for it, so no margin is asked for."""
    urgent = any(need.urgent for need in needs)
    choices = [_cheapest(snapshot, layout, weights, urgent) for layout in snapshot.layouts if meets(layout, needs)]
    _, layout, preempt, considered = min(choices, key=lambda choice: choice[0])
    reason = "; ".join(sorted({need.reason for need in needs}))
    return _decision(snapshot, layout, preempt, reason, math.inf, considered)


def _decision(
    snapshot: Snapshot,
    layout: Layout,
    preempt: str,
    reason: str,
    gain: float,
    considered: dict[str, float],
    stay: float | None = None,
) -> Decision:
    drain_s = switching.drain_s(snapshot, layout)
    return Decision(layout, preempt, reason, gain, considered[preempt], considered, stay, drain_s)


def _cheapest(
    snapshot: Snapshot, layout: Layout, weights: Weights, urgent: bool
) -> tuple[float, Layout, str, dict[str, float]]:
    considered = switching.costs(snapshot, layout, weights, urgent=urgent)
    preempt = min(considered, key=lambda way: considered[way])
    return judge(layout, snapshot.lanes, snapshot.work, weights) + considered[preempt], layout, preempt, considered


def _improve(snapshot: Snapshot, needs: Sequence[Need], weights: Weights) -> Decision | None:
    """Wide when quiet, narrow under load: whatever is predicted to be better by more than it costs."""
    stay = judge(snapshot.layout, snapshot.lanes, snapshot.work, weights)
    judged: dict[tuple[int, ...], float] = {}
    best: tuple[float, float, Layout] | None = None
    alone = snapshot.work.running == 1 and not snapshot.work.waiting
    for layout in snapshot.layouts:
        if layout == snapshot.layout or not meets(layout, needs):
            continue
        if alone and layout.widest < snapshot.layout.widest:
            continue  # who is alone gains nothing, and one arrival says little of how many will follow
        shape = tuple(sorted(map(len, layout.groups)))
        if shape not in judged:
            judged[shape] = judge(layout, snapshot.lanes, snapshot.work, weights)
        gain = stay - judged[shape]
        old = sum(load.requests for load in switching.leaving(snapshot, layout).values())
        if gain > 0 and (best is None or (gain, -old) > (best[0], best[1])):
            best = (gain, -old, layout)
    if best is None:
        return None
    gain, _, layout = best
    _, _, preempt, considered = _cheapest(snapshot, layout, weights, urgent=False)
    slower = capacity(layout, snapshot.lanes, snapshot.work, weights) <= capacity(
        snapshot.layout, snapshot.lanes, snapshot.work, weights
    )
    harder = HARDER**snapshot.recent_switches if slower else 1.0
    if gain <= CAUTION * considered[preempt] + MARGIN * harder * stay:
        return None
    work = snapshot.work
    reason = f"load: {work.rate:.2f} requests/s, {work.waiting:.0f} waiting"
    return _decision(snapshot, layout, preempt, reason, gain, considered, stay)


def _return_to(snapshot: Snapshot, layout: Layout, weights: Weights) -> Decision | None:
    """Back to what there is when nobody needs a group."""
    if layout == snapshot.layout:
        return None
    _, _, preempt, considered = _cheapest(snapshot, layout, weights, urgent=False)
    return _decision(snapshot, layout, preempt, "no request needs a group", 0.0, considered)
