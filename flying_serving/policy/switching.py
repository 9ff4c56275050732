"""What a switch costs in each way to make it, in request-seconds (design section 5; paper section 5.2.2).

Whoever runs in a group that the new layout lacks is *old*, whoever waits or comes is *new*.
"""

from __future__ import annotations

from dataclasses import dataclass

from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.forecast import LaneFigures, Outlook, Weights, outlook
from flying_serving.policy.snapshot import GroupLoad, Snapshot

PAUSE_WEIGHT = 3.0
"""A stream that stands still is worse than one that is slow."""
LONG_HORIZONS = 10.0
"""So many horizons is the longest that load is expected to last."""
MOVE_S = 0.005
"""Orders, answers and a step that is cut short."""


def leaving(snapshot: Snapshot, layout: Layout) -> dict[Group, GroupLoad]:
    """Groups with requests that `layout` does not have."""
    return {g: load for g, load in snapshot.loads.items() if load.requests and g not in layout.groups}


def drain_s(snapshot: Snapshot, layout: Layout) -> float:
    """Seconds until the last request has ended that `layout` has no group for, if nothing else runs meanwhile."""
    groups = leaving(snapshot, layout).items()
    return max((_alone_s(snapshot.lanes[len(group)], load) for group, load in groups), default=0.0)


def _step_s(lane: LaneFigures, load: GroupLoad) -> float:
    return lane.cost.step_s(0, load.requests, load.requests * load.context_tokens)


def _alone_s(lane: LaneFigures, load: GroupLoad) -> float:
    return load.prefill_tokens * lane.cost.prefill_token_s + load.longest_left * _step_s(lane, load)


@dataclass(frozen=True)
class _Case:
    """A switch that is considered: who is new."""

    snapshot: Snapshot
    weights: Weights
    weight: float
    """What a second before the first token of a new request counts for."""
    groups: list[Group]
    ahead: Outlook

    @property
    def members(self) -> set[int]:
        """Engines of groups that are new."""
        return {engine for group in self.groups for engine in group}

    @property
    def size(self) -> int:
        """Engines in the widest new group."""
        return max(map(len, self.groups))

    def queue(self, busy_s: float, share: float) -> float:
        """Request-seconds in the queue that builds up while new work has only a share of the time, until it is gone."""
        work, horizon_s, most = self.snapshot.work, self.weights.horizon_s, self.ahead.first_per_s
        slow = max(0.0, work.waiting + (work.rate - share * most) * busy_s)
        fast = max(0.0, work.waiting + (work.rate - most) * busy_s)
        spare = most - work.rate
        clears_s = min(horizon_s, (slow - fast) / spare) if spare > 0 else horizon_s
        return (slow - fast) * (busy_s + clears_s) / 2


@dataclass(frozen=True)
class _Old:
    """A group that goes away, with its requests.

    `alone_s`: until its last request has ended, if nothing else runs; `mean_s`: until one of them has, on average;
    `crowded_s`: how long its steps would take if it stayed and got its part of new work.
    """

    load: GroupLoad
    overlap: float
    step_s: float
    crowded_s: float
    alone_s: float
    mean_s: float

    @classmethod
    def of(cls, case: _Case, group: Group, load: GroupLoad) -> _Old:
        snapshot = case.snapshot
        lane = snapshot.lanes[len(group)]
        step_s = _step_s(lane, load)
        prefill_s = load.prefill_tokens * lane.cost.prefill_token_s
        engines = sum(map(len, snapshot.layout.groups))
        part = len(group) / engines if group in snapshot.layout.groups else 0.0
        stay = outlook(lane, 1, snapshot.work.part(part), case.weights)
        return cls(
            load=load,
            overlap=len(case.members.intersection(group)) / max(1, len(case.members)),
            step_s=step_s,
            crowded_s=max(step_s, stay.tpot_s),
            alone_s=_alone_s(lane, load),
            mean_s=prefill_s + load.tokens_left * step_s,
        )

    def weave(self, case: _Case) -> float:
        """Both sides get half of the time until its last request has ended."""
        work, woven_s = case.snapshot.work, 2 * self.alone_s
        coming = work.rate * woven_s
        # it would not have been alone in its steps if it had stayed, either
        slower_s = max(0.0, 2 * self.mean_s - self.load.tokens_left * self.crowded_s)
        old = self.load.requests * slower_s * min(1.0, work.waiting + coming)
        first = case.queue(woven_s, 0.5) + coming * min(self.alone_s, case.ahead.tpot_s)
        later = coming * min(woven_s, work.output_tokens * case.ahead.tpot_s) / 2
        return self.overlap * (old + case.weight * first + later)

    def hard(self, case: _Case) -> float:
        """Its requests stand still as long as there is new work: for long if that comes nearly as fast as it can go."""
        work, ahead = case.snapshot.work, case.ahead
        coming = work.rate * 2 * self.alone_s
        busy_s = (work.waiting + coming) * ahead.ttft_s / len(case.groups) + work.output_tokens * ahead.tpot_s
        longest_s = LONG_HORIZONS * case.weights.horizon_s
        used = min(1.0, work.rate / ahead.first_per_s)
        paused_s = min(busy_s / max(1 - used, busy_s / longest_s), longest_s) * min(1.0, work.waiting + coming)
        return PAUSE_WEIGHT * self.load.requests * paused_s

    def again_s(self, case: _Case) -> float:
        """Seconds in which the new groups prefill what its requests have."""
        cost = case.snapshot.lanes[case.size].cost
        return self.load.requests * self.load.context_tokens * cost.prefill_token_s / len(case.groups)


def costs(snapshot: Snapshot, layout: Layout, weights: Weights, *, urgent: bool) -> dict[str, float]:
    """Predicted request-seconds of a switch to `layout`, by way to make it.

    Args:
        urgent: the switch is for requests that must not wait: a second of theirs weighs `ttft_weight` times more.
    """
    leave = leaving(snapshot, layout)
    if not leave:
        return {"weave": MOVE_S}
    groups = [group for group in layout.groups if group not in snapshot.layout.groups]
    ahead = outlook(snapshot.lanes[max(map(len, groups))], len(groups), snapshot.work, weights)
    case = _Case(snapshot, weights, weights.ttft_weight ** (2 if urgent else 1), groups, ahead)
    old = [_Old.of(case, group, load) for group, load in leave.items()]
    work = snapshot.work
    drain_s = max(one.alone_s for one in old)
    again_s = sum(one.again_s(case) for one in old)
    stalled = sum(one.load.requests for one in old) * again_s / 2
    result = {
        "weave": MOVE_S + sum(one.weave(case) for one in old),
        "hard": MOVE_S + sum(one.hard(case) for one in old),
        "sequential": MOVE_S + case.weight * (work.waiting * drain_s + work.rate * drain_s**2 / 2),
        "recompute": MOVE_S + PAUSE_WEIGHT * stalled + case.weight * case.queue(again_s, 0.0),
    }
    if case.size > 1 and _has_idle_member(snapshot, case.members):
        result["soft"] = MOVE_S + _soft(snapshot, case.size, drain_s, case.weight)
    return result


def at_once(snapshot: Snapshot, layout: Layout, weights: Weights) -> str:
    """The cheapest way to switch of those that do not wait for old requests to end."""
    considered = costs(snapshot, layout, weights, urgent=False)
    return min({"weave", "hard", "recompute"} & considered.keys(), key=lambda way: considered[way])


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
