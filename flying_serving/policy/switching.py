"""What a switch costs in each way to make it, in request-seconds (design section 5; paper section 5.2.2).

Whoever runs in a group that the new layout lacks is *old*, whoever waits or comes is *new*.
"""

from __future__ import annotations

from collections.abc import Mapping

from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.forecast import Outlook, Weights, Work, outlook
from flying_serving.policy.snapshot import GroupLoad, Snapshot

PAUSE_WEIGHT = 3.0
"""A stream that stands still is worse than one that is slow."""
MOVE_S = 0.005
"""Orders, answers and a step that is cut short."""


def leaving(snapshot: Snapshot, layout: Layout) -> dict[Group, GroupLoad]:
    """Groups with requests that `layout` does not have."""
    return {g: load for g, load in snapshot.loads.items() if load.requests and g not in layout.groups}


def costs(snapshot: Snapshot, layout: Layout, weights: Weights, *, urgent: bool) -> Mapping[str, float]:
    """Predicted request-seconds of a switch to `layout`, by way to make it.

    Args:
        urgent: the switch is for requests that must not wait: a second of theirs weighs `ttft_weight` times more.
    """
    old = leaving(snapshot, layout)
    if not old:
        return {"weave": MOVE_S}
    new_groups = [g for g in layout.groups if g not in snapshot.layout.groups]
    members = {engine for group in new_groups for engine in group}
    size = max(map(len, new_groups))
    ahead = outlook(snapshot.lanes[size], len(new_groups), snapshot.work, weights)
    new_cost = snapshot.lanes[size].cost
    new_step_s, new_ttft_s = ahead.tpot_s, ahead.ttft_s
    work = snapshot.work
    weight = weights.ttft_weight * (weights.ttft_weight if urgent else 1.0)
    result = {"weave": MOVE_S, "hard": MOVE_S, "sequential": MOVE_S}
    drain_s = again_s = 0.0
    for group, load in old.items():
        overlap = len(members.intersection(group)) / max(1, len(members))
        step_s = _step_s(snapshot, group, load)
        prefill_s = load.prefill_tokens * snapshot.lanes[len(group)].cost.prefill_token_s
        alone_s = prefill_s + load.longest_left * step_s
        woven_s = 2 * alone_s  # both sides get half of the time
        coming = work.rate * woven_s
        occupied = overlap * min(1.0, work.waiting + coming)
        crowded_s = max(
            step_s, outlook(snapshot.lanes[len(group)], 1, work.part(_part(snapshot, group)), weights).tpot_s
        )
        slower_s = max(
            0.0, 2 * (prefill_s + load.tokens_left * step_s) - load.tokens_left * crowded_s
        )  # it would not have been alone here either
        result["weave"] += load.requests * slower_s * occupied
        result["weave"] += (
            overlap
            * weight
            * (_queue(work, ahead, woven_s, 0.5, weights.horizon_s) + coming * min(alone_s, new_step_s))
        )
        result["weave"] += overlap * coming * min(woven_s, work.output_tokens * new_step_s) / 2
        busy_s = (work.waiting + coming) * new_ttft_s / len(new_groups) + work.output_tokens * new_step_s
        result["hard"] += PAUSE_WEIGHT * load.requests * min(busy_s, weights.horizon_s) * occupied
        drain_s = max(drain_s, alone_s)
        again_s += load.requests * load.context_tokens * new_cost.prefill_token_s / len(new_groups)
    stalled = sum(load.requests for load in old.values()) * again_s / 2
    lost = _queue(work, ahead, again_s, 0.0, weights.horizon_s)
    result["recompute"] = MOVE_S + PAUSE_WEIGHT * stalled + weight * lost
    arrivals = work.rate * drain_s
    result["sequential"] += weight * (work.waiting * drain_s + arrivals * drain_s / 2)
    if size > 1 and _has_idle_member(snapshot, members):
        result["soft"] = MOVE_S + _soft(snapshot, size, drain_s, weight)
    return result


def _queue(work: Work, ahead: Outlook, busy_s: float, share: float, horizon_s: float) -> float:
    """Request-seconds in the queue that builds up while new work has only a share of the time, until it is gone."""
    slow = max(0.0, work.waiting + (work.rate - share * ahead.first_per_s) * busy_s)
    fast = max(0.0, work.waiting + (work.rate - ahead.first_per_s) * busy_s)
    spare = ahead.first_per_s - work.rate
    clears_s = min(horizon_s, (slow - fast) / spare) if spare > 0 else horizon_s
    return (slow - fast) * (busy_s + clears_s) / 2


def _part(snapshot: Snapshot, group: Group) -> float:
    """Share of new work that this group would get if nothing changed."""
    return len(group) / sum(map(len, snapshot.layout.groups)) if group in snapshot.layout.groups else 0.0


def _step_s(snapshot: Snapshot, group: Group, load: GroupLoad) -> float:
    cost = snapshot.lanes[len(group)].cost
    return cost.step_s(0, load.requests, load.requests * load.context_tokens)


def _has_idle_member(snapshot: Snapshot, members: set[int]) -> bool:
    busy = {engine for group, load in snapshot.loads.items() if load.requests for engine in group}
    return bool(members - busy)


def _soft(snapshot: Snapshot, size: int, drain_s: float, weight: float) -> float:
    """An idle member runs new requests until the group is free, then they are prefilled again in the group."""
    work = snapshot.work
    narrow, wide = snapshot.lanes[1].cost, snapshot.lanes[size].cost
    fixed_s = max(0.0, narrow.fixed_s - wide.fixed_s)
    prefill_s = max(0.0, narrow.prefill_token_s - wide.prefill_token_s) * work.prompt_tokens
    early = work.waiting + work.rate * drain_s
    tokens_by_then = drain_s / max(narrow.step_s(0, 1, work.prompt_tokens), 1e-9)
    again_s = wide.prefill_token_s * (work.prompt_tokens + min(tokens_by_then, work.output_tokens))
    stays = 1.0 if tokens_by_then < work.output_tokens else 0.0
    return early * (
        weight * (fixed_s + prefill_s) + min(tokens_by_then, work.output_tokens) * fixed_s + stays * again_s
    )
