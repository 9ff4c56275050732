"""What a switch costs in each way to make it, in request-seconds (design section 5; paper section 5.2.2).

Requests that run in a group that the new layout lacks are *old*; requests that wait or arrive are *new*.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flying_serving.layout.groups import Group, Layout, aligned_group
from flying_serving.policy.snapshot import GroupLoad, Snapshot
from flying_serving.predict.forecast import Forecast, capacity, first_per_s, judge, outlook
from flying_serving.predict.work import FREE, Interference, Weights, Work

PAUSE_WEIGHT = 3.0
"""A stream that stands still is worse than one that is slow."""
LONG_HORIZONS = 10.0
"""Horizons that load is expected to last at most."""
MOVE_S = 0.005
"""Orders and answers."""
LATER = "later"
"""Among the ways to switch: not yet, as long as requests run that only the present groups hold."""
NOBODY = GroupLoad(0, 0.0, 0.0, 0.0)


def leaving(snapshot: Snapshot, layout: Layout) -> dict[Group, GroupLoad]:
    """Groups with requests that `layout` does not have."""
    return {g: load for g, load in snapshot.loads.items() if load.requests and g not in layout.groups}


def bound(leave: Mapping[Group, GroupLoad], layout: Layout) -> dict[Group, GroupLoad]:
    """Of the requests in groups that go away, those that no group of `layout` can hold."""
    found = {group: load.staying(layout) for group, load in leave.items()}
    return {group: load for group, load in found.items() if load is not None}


def drain_s(snapshot: Snapshot, layout: Layout) -> float:
    """Seconds until the last request has ended that `layout` has no group for, if nothing else runs meanwhile."""
    groups = leaving(snapshot, layout).items()
    return max((_Old.of(snapshot, group, load).alone_s for group, load in groups), default=0.0)


@dataclass(frozen=True)
class _Case:
    """A switch that is considered: what it leaves, and what it makes of the rest of the work.

    Args:
        staying: of these, those that no new group can hold.
        requests, tokens: in groups that go away, and the context that they have.
        last_s: until the last of these has ended, if nothing else runs.
        streaming_s: request-seconds of these until then.
        groups: how many share the work in the new layout.
        size: engines in the widest of those that are new.
        weights: of requests that are new.
        aside: the work without what runs in groups that go away.
        ahead: what the new groups would do with that.
        used: share of the time in which they have any.
    """

    snapshot: Snapshot
    layout: Layout
    old: list[_Old]
    staying: dict[Group, GroupLoad]
    requests: int
    tokens: float
    last_s: float
    streaming_s: float
    groups: int
    size: int
    weights: Weights
    aside: Work
    ahead: Forecast
    used: float

    @classmethod
    def of(cls, snapshot: Snapshot, layout: Layout, leave: dict[Group, GroupLoad], weights: Weights) -> _Case:
        """What `layout` makes of it, when requests of `leave` have to go."""
        old = [_Old.of(snapshot, group, load) for group, load in leave.items()]
        requests = sum(one.load.requests for one in old)
        new = [group for group in layout.groups if group not in snapshot.layout.groups]
        size = max(map(len, new or layout.groups))  # none is new for those that an earlier switch has left
        work = snapshot.work
        early = weights.ttft_weight - 1.0  # what a second of theirs counts for beside one of streaming
        old_prompts = sum(one.load.prompts for one in old)
        old_begun = sum(one.load.prefill_tokens for one in old) / work.prompt_tokens
        streams, begun = work.running - (requests - old_prompts), work.begun - old_begun
        aside = replace(work, running=max(0.0, streams), begun=max(0.0, begun))
        groups = sum(map(len, layout.groups)) // size
        ahead = outlook(snapshot.lanes[size], groups, aside, weights)
        busy = work.waiting + work.rate * (ahead.ttft_s + work.output_tokens * ahead.tpot_s) / groups
        return cls(
            snapshot=snapshot,
            layout=layout,
            old=old,
            staying=bound(leave, layout),
            requests=requests,
            tokens=sum(one.tokens for one in old),
            last_s=max(one.alone_s for one in old),
            streaming_s=sum(one.load.requests * one.mean_s + early * one.load.prompts * one.prefill_s for one in old),
            groups=groups,
            size=size,
            weights=weights,
            aside=aside,
            ahead=ahead,
            used=min(1.0, busy),
        )

    def with_old(self, interference: Interference) -> float:
        """Request-seconds if requests of the old layout are not in the new one, but in its way."""
        return judge(self.layout, self.snapshot.lanes, self.aside, self.weights, interference)

    def weave(self, blocked_s: float = 0.0) -> float:
        """Both sides get half of the time while both have work, until the last old request has ended.

        Before that both do nothing for `blocked_s`.
        """
        engines = sum(one.engines for one in self.old)
        overlap = min(1.0, engines / sum(map(len, self.layout.groups)))
        turn_s = sum(one.step_s * one.engines for one in self.old) / engines
        synced = max(1.0, max(one.engines for one in self.old) / self.size)
        step_s = self.ahead.tpot_s
        stretch = 1 + self.used * step_s / max(step_s, turn_s)
        woven_s = blocked_s + stretch * self.last_s
        interference = Interference(blocked_s, woven_s, turn_s, overlap, synced, held_tokens=self.tokens)
        return stretch * self.streaming_s + self.with_old(interference)

    def hard(self) -> float:
        """Old requests stand still as long as there is new work: for long if it comes nearly as fast as it can go."""
        work, ahead = self.aside, self.ahead
        coming = work.rate * 2 * self.last_s
        busy_s = (work.waiting + coming) * ahead.ttft_s / self.groups + work.output_tokens * ahead.tpot_s
        longest_s = LONG_HORIZONS * self.weights.horizon_s
        used = min(1.0, work.rate / first_per_s(self.snapshot.lanes[self.size], self.groups, work))
        paused_s = min(busy_s / max(1 - used, busy_s / longest_s), longest_s) * min(1.0, work.waiting + coming)
        return PAUSE_WEIGHT * self.requests * paused_s + self.streaming_s + self.with_old(FREE)

    def later(self) -> float:
        """Everyone stays until `staying` have ended and shares steps with them, where a weave gives them their own.

        Until then the new groups are as much slower as the present ones are.
        """
        lanes, work = self.snapshot.lanes, self.snapshot.work
        slower = capacity(self.layout, lanes, work) / capacity(self.snapshot.layout, lanes, work) - 1
        step_s = self.ahead.tpot_s * (1 + slower)
        until_s = max(
            lanes[len(group)].prompts_s(load.prefill_tokens, load.prompts) + load.longest_left * step_s
            for group, load in self.staying.items()
        )
        held_tokens = sum(load.requests * load.context_tokens for load in self.staying.values())
        held = Interference(woven_s=until_s, overlap=slower, held_tokens=held_tokens)
        return judge(self.layout, lanes, work, self.weights, held)

    def sequential(self) -> float:
        """New requests wait until the last old one has ended."""
        return self.streaming_s + self.with_old(Interference(blocked_s=self.last_s))

    def move(self) -> float:
        """Old requests go on in the new groups once their KV is there; new ones wait behind.

        Those that no new group holds, `staying`, stay behind, and are woven.
        """
        still_s = self.still_s()
        moving = self.requests - sum(load.requests for load in self.staying.values())
        if self.staying:
            there = _Case.of(self.snapshot, self.layout, self.staying, self.weights).weave(still_s)
        else:
            work, blocked = self.snapshot.work, Interference(blocked_s=still_s)
            there = judge(self.layout, self.snapshot.lanes, work, self.weights, blocked)
        return PAUSE_WEIGHT * moving * still_s / 2 + there

    def still_s(self) -> float:
        """Until old requests go on: covers exchange KV side by side, and what cannot come along is prefilled again."""
        lanes = self.snapshot.lanes
        again_tokens = 0.0
        exchanging_s: defaultdict[Group, float] = defaultdict(float)
        for one in self.old:
            stays = self.staying.get(one.group, NOBODY)
            requests, tokens = one.load.requests - stays.requests, one.tokens - stays.requests * stays.context_tokens
            size = max(one.engines, self.size)
            move = lanes[size].move
            if move is None:
                again_tokens += tokens
            else:
                pairs = min(requests, size // self.size)
                exchanging_s[aligned_group(one.group[0], size)] += pairs * move.fixed_s + move.token_s * tokens
        again_s = lanes[self.size].prompts_s(again_tokens, self.requests) / self.groups
        return max(exchanging_s.values(), default=0.0) + again_s


@dataclass(frozen=True)
class _Old:
    """A group that goes away, with its requests.

    If nothing else runs, `prefill_s`: until its prompts are done; `alone_s`: until its last request has ended;
    `mean_s`: until one of them has, on average.
    """

    group: Group
    load: GroupLoad
    step_s: float
    prefill_s: float
    alone_s: float
    mean_s: float

    @classmethod
    def of(cls, snapshot: Snapshot, group: Group, load: GroupLoad) -> _Old:
        lane = snapshot.lanes[len(group)]
        prefill_s = lane.prompts_s(load.prefill_tokens, load.prompts)
        step_s = lane.cost.step_s(0, load.requests, load.requests * load.context_tokens)
        alone_s, mean_s = (prefill_s + left * step_s for left in (load.longest_left, load.tokens_left))
        return cls(group, load, step_s, prefill_s, alone_s, mean_s)

    @property
    def engines(self) -> int:
        """How many it has."""
        return len(self.group)

    @property
    def tokens(self) -> float:
        """Context of all of its requests."""
        return self.load.requests * self.load.context_tokens


def costs(
    snapshot: Snapshot, layout: Layout, weights: Weights, *, urgent: bool, there: float | None = None
) -> dict[str, float]:
    """Predicted request-seconds of a switch to `layout`, by way to make it: more than if all were there already.

    One of the ways is LATER, not to make it yet, if there are requests that `layout` cannot hold and nobody is urgent.

    Args:
        urgent: the switch is for requests that must not wait: a second of theirs weighs `ttft_weight` times more.
        there: what `judge` says of `layout`, if that is known and nobody is urgent.
    """
    leave = leaving(snapshot, layout)
    if not leave:
        return {"weave": MOVE_S}
    if urgent:
        weights = replace(weights, ttft_weight=weights.ttft_weight**2)
    case = _Case.of(snapshot, layout, leave, weights)
    if there is None or urgent:
        there = judge(layout, snapshot.lanes, snapshot.work, weights)
    ways = {"weave": case.weave(), "migrate": case.move()}
    if urgent or not case.staying:  # until those have ended it is better to stay than to do nothing
        ways["sequential"] = case.sequential()
    elif case.staying.keys() & set(snapshot.layout.groups):
        ways[LATER] = case.later()
    if urgent:  # nobody else has the right to stop those that run
        ways["hard"] = case.hard()
    result = {way: MOVE_S + max(0.0, total - there) for way, total in ways.items()}
    if case.size > 1 and _has_idle_member(snapshot, layout):
        result["soft"] = MOVE_S + _soft(snapshot, case.size, case.last_s, weights.ttft_weight)
    return result


def at_once(snapshot: Snapshot, layout: Layout, weights: Weights) -> str:
    """The cheapest way to switch of those that do not wait for old requests to end."""
    considered = costs(snapshot, layout, weights, urgent=False)
    # not a set: of ways that cost the same it has to be the same one in every run
    return min((way for way in ("weave", "migrate") if way in considered), key=considered.__getitem__)


def _has_idle_member(snapshot: Snapshot, layout: Layout) -> bool:
    members = {engine for group in layout.groups if group not in snapshot.layout.groups for engine in group}
    busy = {engine for group, load in snapshot.loads.items() if load.requests for engine in group}
    return bool(members - busy)


def _soft(snapshot: Snapshot, size: int, drain_s: float, weight: float) -> float:
    """An idle member runs new requests until the group is free, then they move to the group or are prefilled again."""
    work = snapshot.work
    narrow, wide, move = snapshot.lanes[1], snapshot.lanes[size], snapshot.lanes[size].move
    fixed_s = max(0.0, narrow.cost.fixed_s - wide.cost.fixed_s)
    prefill_s = max(0.0, narrow.prompts_s(work.prompt_tokens, 1) - wide.prompts_s(work.prompt_tokens, 1))
    early = work.waiting + work.rate * drain_s
    tokens_by_then = drain_s / max(narrow.cost.step_s(0, 1, work.prompt_tokens), 1e-9)
    outputs = min(tokens_by_then, work.output_tokens)
    context = work.prompt_tokens + outputs
    moves_s = move.seconds(context) if move is not None else wide.prompts_s(context, 1)
    stays = 1.0 if tokens_by_then < work.output_tokens else 0.0
    return early * (weight * (fixed_s + prefill_s) + outputs * fixed_s + stays * moves_s)
