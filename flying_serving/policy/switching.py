"""The cost of a switch in each mode, in request-seconds.

Requests that run in a group that the new layout lacks are *old*; requests that wait or arrive are
*new*. Old requests that no group of the new layout holds are *stragglers*.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flying_serving.layout.groups import Group, Layout, aligned_group
from flying_serving.policy.ranking import Measure, Ranking
from flying_serving.policy.snapshot import LATER, Decision, GroupLoad, Snapshot
from flying_serving.predict.forecast import Forecast, assess, capacity, first_per_s, forecast
from flying_serving.predict.work import NO_INTERFERENCE, Interference, Objective, Work, weight

NO_LOAD = GroupLoad(0, 0.0, 0.0, 0.0)


def leaving(snapshot: Snapshot, layout: Layout) -> dict[Group, GroupLoad]:
    """Return the groups with requests that `layout` does not have."""
    return {
        g: load for g, load in snapshot.loads.items() if load.requests and g not in layout.groups
    }


def stragglers_of(leave: Mapping[Group, GroupLoad], layout: Layout) -> dict[Group, GroupLoad]:
    """Return, by group that goes away, the load of its requests that no group of `layout` can
    hold.
    """
    found = {group: load.stragglers(layout) for group, load in leave.items()}
    return {group: load for group, load in found.items() if load is not None}


def drain_s(snapshot: Snapshot, layout: Layout) -> float:
    """Return the seconds until the last request in groups that `layout` lacks has ended, if no
    other requests run.
    """
    groups = leaving(snapshot, layout).items()
    return max(
        (DrainingGroup.of(snapshot, group, load).alone_s for group, load in groups), default=0.0
    )


def next_end_s(snapshot: Snapshot) -> float:
    """Return the seconds until a request ends in a group of the present layout, which others may
    wait for. It is infinite if none runs there.
    """
    running = [
        (load.requests, DrainingGroup.of(snapshot, group, load))
        for group, load in snapshot.loads.items()
        if load.requests and group in snapshot.layout.groups
    ]
    return min((group.mean_s / count for count, group in running), default=math.inf)


@dataclass(frozen=True)
class SwitchCandidate:
    """A switch that is considered: the old requests, and a forecast of the other work in the new
    layout.

    Args:
        snapshot: the cluster now.
        layout: the new layout.
        old: the groups that end, with their requests: the old requests.
        stragglers: load of the old requests that no new group holds, by old group.
        requests: the number of old requests.
        tokens: context tokens of the old requests.
        last_s: seconds until the last old request has ended, if no others run.
        streaming_s: request-seconds of the old requests until then.
        groups: the number of groups that share the work in the new layout.
        size: engines of the widest new group.
        objective: of the layout.
        measure: the figure of a forecast.
        other_work: the work without the old requests.
        forecast: of the new groups with that work.
        busy_share: share of time in which the new groups have work.
    """

    snapshot: Snapshot
    layout: Layout
    old: list[DrainingGroup]
    stragglers: dict[Group, GroupLoad]
    requests: int
    tokens: float
    last_s: float
    streaming_s: float
    groups: int
    size: int
    objective: Objective
    measure: Measure
    other_work: Work
    forecast: Forecast
    busy_share: float

    @property
    def in_flight(self) -> float:
        """Number of requests that wait or run, all of which stand still while KV migrates."""
        return self.snapshot.work.waiting + sum(
            load.requests for load in self.snapshot.loads.values()
        )

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        layout: Layout,
        leave: dict[Group, GroupLoad],
        objective: Objective,
        measure: Measure,
    ) -> SwitchCandidate:
        """Return the candidate of a switch to `layout`, when requests of `leave` have to go."""
        old = [DrainingGroup.of(snapshot, group, load) for group, load in leave.items()]
        requests = sum(group.load.requests for group in old)
        new = [group for group in layout.groups if group not in snapshot.layout.groups]
        # no group is new for requests that an earlier switch left behind
        size = max(map(len, new or layout.groups))
        work = snapshot.work
        old_prompts = sum(group.load.prompts for group in old)
        old_begun = sum(group.load.prefill_tokens for group in old) / work.prompt_tokens
        streams, begun = work.running - (requests - old_prompts), work.begun - old_begun
        other_work = replace(work, running=max(0.0, streams), begun=max(0.0, begun))
        groups = sum(map(len, layout.groups)) // size
        ahead = forecast(snapshot.lane_figures[size], groups, other_work, objective)
        busy = (
            work.waiting + work.rate * (ahead.ttft_s + work.output_tokens * ahead.tpot_s) / groups
        )
        return cls(
            snapshot=snapshot,
            layout=layout,
            old=old,
            stragglers=stragglers_of(leave, layout),
            requests=requests,
            tokens=sum(group.tokens for group in old),
            last_s=max(group.alone_s for group in old),
            streaming_s=sum(group.load.requests * group.mean_s for group in old),
            groups=groups,
            size=size,
            objective=objective,
            measure=measure,
            other_work=other_work,
            forecast=ahead,
            busy_share=min(1.0, busy),
        )

    def with_old(self, interference: Interference) -> float:
        """Return the request-seconds if old requests are not in the new layout, but in its way."""
        return self._figure(self.other_work, interference)

    def _figure(self, work: Work, interference: Interference) -> float:
        lanes = self.snapshot.lane_figures
        return self.measure(assess(self.layout, lanes, work, self.objective, interference))

    def cost_of_weave(self, blocked_s: float = 0.0) -> float:
        """Return the cost if both sides get half of the time while both have work, until the last
        old request has ended.

        Before that both do nothing for `blocked_s`.
        """
        engines = sum(group.engines for group in self.old)
        overlap = min(1.0, engines / sum(map(len, self.layout.groups)))
        slice_s = sum(group.step_s * group.engines for group in self.old) / engines
        synced = max(1.0, max(group.engines for group in self.old) / self.size)
        step_s = self.forecast.tpot_s
        stretch = 1 + self.busy_share * step_s / max(step_s, slice_s)
        woven_s = blocked_s + stretch * self.last_s
        interference = Interference(
            blocked_s, woven_s, slice_s, overlap, synced, held_tokens=self.tokens
        )
        loan_s = woven_s * any(need.lends for need in self.snapshot.needs)
        return stretch * self.streaming_s + self.with_old(interference) + loan_s

    def cost_of_hard(self) -> float:
        """Return the cost if old requests pause while there is new work.

        They pause for long if work arrives nearly as fast as it can be done.
        """
        work, ahead, horizon_s = self.other_work, self.forecast, self.objective.horizon_s
        arriving = work.rate * 2 * self.last_s
        busy_s = (
            work.waiting + arriving
        ) * ahead.ttft_s / self.groups + work.output_tokens * ahead.tpot_s
        used = min(
            1.0, work.rate / first_per_s(self.snapshot.lane_figures[self.size], self.groups, work)
        )
        paused_s = min(busy_s / max(1 - used, busy_s / horizon_s), horizon_s) * min(
            1.0, work.waiting + arriving
        )
        return self.requests * paused_s + self.streaming_s + self.with_old(NO_INTERFERENCE)

    def cost_of_later(self) -> float:
        """Return the cost if the present layout stays until the stragglers have ended, and all
        requests share its steps.

        Until then a step of the new layout counts as longer by `slower`, so that it has the present
        one's capacity.
        """
        lanes, work = self.snapshot.lane_figures, self.snapshot.work
        slower = _slower(self.snapshot, self.layout)
        step_s = self.forecast.tpot_s * (1 + slower)
        until_s = max(
            lanes[len(group)].prompts_s(load.prefill_tokens, load.prompts)
            + load.longest_tokens_left * step_s
            for group, load in self.stragglers.items()
        )
        held_tokens = sum(load.requests * load.context_tokens for load in self.stragglers.values())
        held = Interference(woven_s=until_s, overlap=slower, held_tokens=held_tokens)
        return self._figure(work, held)

    def cost_of_sequential(self) -> float:
        """Return the cost if new requests wait until the last old one has ended."""
        return self.streaming_s + self.with_old(Interference(blocked_s=self.last_s))

    def blocked(self) -> float:
        """Return the request-seconds that new requests wait until the last old one has ended."""
        work = self.snapshot.work
        arriving = work.rate_between(0.0, self.last_s) * self.last_s if self.last_s else 0.0
        return self.objective.urgency * (work.waiting + arriving / 2) * self.last_s

    def cost_of_migrate(self) -> float:
        """Return the cost if old requests go on in the new groups once their KV is there.

        New requests wait behind them; stragglers are woven.
        """
        pause_s = self.pause_s()
        migrating = self.requests - sum(load.requests for load in self.stragglers.values())
        if self.stragglers:
            there = SwitchCandidate.of(
                self.snapshot, self.layout, self.stragglers, self.objective, self.measure
            ).cost_of_weave(pause_s)
        else:
            there = self._figure(self.snapshot.work, Interference(blocked_s=pause_s))
        return migrating * pause_s / 2 + there

    def pause_s(self) -> float:
        """Return the seconds until old requests go on.

        Enclosing groups migrate KV side by side; other KV is prefilled again.
        """
        lanes = self.snapshot.lane_figures
        again_tokens = 0.0
        migrating_s: defaultdict[Group, float] = defaultdict(float)
        for group in self.old:
            rest = self.stragglers.get(group.group, NO_LOAD)
            requests, tokens = (
                group.load.requests - rest.requests,
                group.tokens - rest.requests * rest.context_tokens,
            )
            size = max(group.engines, self.size)
            cost = lanes[size].migration
            if cost is None:
                again_tokens += tokens
            else:
                pairs = min(requests, size // self.size)
                migrating_s[aligned_group(group.group[0], size)] += (
                    pairs * cost.fixed_s + cost.token_s * tokens
                )
        again_s = lanes[self.size].prompts_s(again_tokens, self.requests) / self.groups
        return max(migrating_s.values(), default=0.0) + again_s


def _slower(snapshot: Snapshot, layout: Layout) -> float:
    """Return the share by which a step of `layout` has to be longer for it to have the present
    layout's capacity.
    """
    lanes, work = snapshot.lane_figures, snapshot.work
    return capacity(layout, lanes, work) / capacity(snapshot.layout, lanes, work) - 1


def _closed(
    snapshot: Snapshot, layout: Layout, objective: Objective, measure: Measure, figure: float
) -> float:
    """Return the request-seconds of waiting for weights that are lent, during which the present
    layout stays.

    Until they are back a step of the new layout counts as longer, so that it has the present one's
    capacity. `figure`: the figure of `layout`.
    """
    closed_s = snapshot.closed_s(layout)
    if closed_s <= 0.0:
        return 0.0
    until = Interference(woven_s=closed_s, overlap=max(0.0, _slower(snapshot, layout)))
    waiting = assess(layout, snapshot.lane_figures, snapshot.work, objective, until)
    return max(0.0, measure(waiting) - figure)


@dataclass(frozen=True)
class DrainingGroup:
    """A group that ends, with its requests.

    Args:
        group: the group.
        load: its requests.
        step_s: seconds of a step of all of its requests.
        prefill_s: seconds until its prompts are done, if no other requests run.
        alone_s: seconds until its last request has ended, likewise.
        mean_s: seconds until one of its requests has ended, likewise, on average.
    """

    group: Group
    load: GroupLoad
    step_s: float
    prefill_s: float
    alone_s: float
    mean_s: float

    @classmethod
    def of(cls, snapshot: Snapshot, group: Group, load: GroupLoad) -> DrainingGroup:
        lane = snapshot.lane_figures[len(group)]
        prefill_s = lane.prompts_s(load.prefill_tokens, load.prompts)
        step_s = lane.step_s(0, load.requests, load.requests * load.context_tokens)
        alone_s, mean_s = (
            prefill_s + left * step_s for left in (load.longest_tokens_left, load.tokens_left)
        )
        return cls(group, load, step_s, prefill_s, alone_s, mean_s)

    @property
    def engines(self) -> int:
        """Number of engines of the group."""
        return len(self.group)

    @property
    def tokens(self) -> float:
        """Context tokens of all of its requests."""
        return self.load.requests * self.load.context_tokens


def costs(
    snapshot: Snapshot,
    layout: Layout,
    objective: Objective,
    measure: Measure,
    *,
    urgent: bool,
    figure: float | None = None,
) -> dict[str, float]:
    """Predict the request-seconds of a switch to `layout` by mode, beyond those if all requests
    were there already.

    One of the modes is LATER if `layout` has stragglers and the switch is not for `urgent`
    requests, whose first tokens count more. `measure`: the figure by which layouts are ranked.
    `figure`: that of `layout`, if it is known and no request is urgent.
    """
    leave = leaving(snapshot, layout)
    if urgent:
        objective = replace(objective, urgency=weight(urgent=True))
    if figure is None or urgent:
        figure = measure(assess(layout, snapshot.lane_figures, snapshot.work, objective))
    closed = _closed(snapshot, layout, objective, measure, figure)
    if not leave:
        return {"weave": closed}
    candidate = SwitchCandidate.of(snapshot, layout, leave, objective, measure)
    # Requests that stand still cost their time at least, even if the fluid model gains later.
    modes = {
        "weave": candidate.cost_of_weave(),
        "migrate": max(
            candidate.cost_of_migrate(), figure + candidate.pause_s() * candidate.in_flight
        ),
    }
    # until stragglers have ended it is better to stay than to do nothing
    if urgent or not candidate.stragglers:
        modes["sequential"] = max(candidate.cost_of_sequential(), figure + candidate.blocked())
    elif candidate.stragglers.keys() & set(snapshot.layout.groups):
        modes[LATER] = candidate.cost_of_later()
    if urgent:  # no other request may pause running ones
        modes["hard"] = candidate.cost_of_hard()
    result = {mode: max(0.0, total - figure) for mode, total in modes.items()}
    if candidate.size > 1 and _has_idle_member(snapshot, layout):
        result["soft"] = _soft(snapshot, candidate.size, candidate.last_s, objective.urgency)
    return {mode: cost + closed for mode, cost in result.items()}


def decision(
    snapshot: Snapshot, layout: Layout, reason: str, gain: float, considered: Mapping[str, float]
) -> Decision:
    """Return a decision to switch to `layout` in the cheapest of the modes that are considered."""
    mode = min(considered, key=considered.__getitem__)
    return Decision(
        layout,
        mode,
        reason,
        gain,
        considered[mode],
        considered,
        drain_s=drain_s(snapshot, layout),
    )


def at_once(snapshot: Snapshot, layout: Layout, objective: Objective) -> str:
    """Return the cheapest of the modes that do not wait for old requests to end."""
    measure = Ranking.of([layout], snapshot, objective).measure
    considered = costs(snapshot, layout, objective, measure, urgent=False)
    # not a set: of modes that cost the same it has to be the same one in every run
    return min(
        (mode for mode in ("weave", "migrate") if mode in considered), key=considered.__getitem__
    )


def _has_idle_member(snapshot: Snapshot, layout: Layout) -> bool:
    members = {
        engine for group in layout.groups if group not in snapshot.layout.groups for engine in group
    }
    busy = {engine for group, load in snapshot.loads.items() if load.requests for engine in group}
    return bool(members - busy)


def _soft(snapshot: Snapshot, size: int, drain_s: float, urgency: float) -> float:
    """Return the cost if an idle member runs new requests until the group is free.

    Then they migrate to the group or are prefilled again.
    """
    work, figures = snapshot.work, snapshot.lane_figures
    narrow, wide, cost = figures[1], figures[size], figures[size].migration
    fixed_s = max(0.0, narrow.cost.fixed_s - wide.cost.fixed_s)
    prefill_s = max(
        0.0, narrow.prompts_s(work.prompt_tokens, 1) - wide.prompts_s(work.prompt_tokens, 1)
    )
    early = work.waiting + work.rate * drain_s
    tokens_by_then = drain_s / max(narrow.step_s(0, 1, work.prompt_tokens), 1e-9)
    outputs = min(tokens_by_then, work.output_tokens)
    context = work.prompt_tokens + outputs
    migration_s = cost.seconds(context) if cost is not None else wide.prompts_s(context, 1)
    unfinished = 1.0 if tokens_by_then < work.output_tokens else 0.0
    return early * (urgency * (fixed_s + prefill_s) + outputs * fixed_s + unfinished * migration_s)
