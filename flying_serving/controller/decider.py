"""Questions to the policy for the next layout, and its answers, which are kept for operators."""

from collections import deque
from typing import NamedTuple

from flying_serving.controller.requests import RequestState
from flying_serving.controller.snapshots import snapshot
from flying_serving.controller.state import ClusterState
from flying_serving.policy.regret import Regret
from flying_serving.policy.snapshot import Decision


class Verdict(NamedTuple):
    """The policy's wish: a switch, or that requests migrate to the layout, or neither."""

    switch: Decision | None = None
    migrates_left_behind: bool = False


class Decider:
    """Asks the policy.

    `last`: its last answer. `dry_run`: the switches of a dry run, which are not made.
    """

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self.last: Decision | None = None
        self._regret = Regret(state.settings.objective.horizon_s)
        self.dry_run: deque[Decision] = deque(maxlen=100)

    def decide(self, now_s: float) -> Verdict:
        """Ask the policy.

        The policy is not asked about a fixed layout, also where there is one group size only,
        without engines, or before all sizes are measured.
        """
        state, settings = self._state, self._state.settings
        is_fixed = settings.policy.pinned_size is not None or len(state.sizes) == 1
        if is_fixed or not state.layout.groups:
            return Verdict()
        lanes = state.lane_figures()
        if len(lanes) < len(state.sizes):
            return Verdict()

        shot = snapshot(state, lanes, now_s, self._regret.until(state.layout, now_s))
        state.switches.note_needs(shot.needs, now_s)
        self.last = settings.policy.decide(shot, settings.objective)
        is_for_load = self.last is not None and self.last.stay is not None
        self._regret.note(self.last.gain if self.last is not None and is_for_load else 0.0)
        decision = self.last if self.last is not None and self.last.is_made else None
        if is_for_load and not state.switches.are_settled(now_s):
            decision = None

        if settings.dry_run:
            self._record_dry_run(decision)
            return Verdict()
        if decision is not None:
            return Verdict(decision)
        return Verdict(None, settings.policy.migrates_left_behind(shot, settings.objective))

    def is_worth_asking(self, request: RequestState) -> bool:
        """Return whether the policy is asked now that a request has arrived, or only at the next
        tick.

        It is asked for an urgent request, and for one that waits. It is not asked in a long queue,
        where one request more changes little. Nor is it while a request runs that one engine cannot
        hold: layouts are dear to evaluate then.
        """
        if request.spec.urgent:
            return True
        state = self._state
        is_short = len(state.pool) <= state.settings.limits.max_num_seqs
        runs_wide = any(state.loads[group].wide for group in state.layout.groups)
        return request.request_id in state.pool and is_short and not runs_wide

    def _record_dry_run(self, decision: Decision | None) -> None:
        """Keep a decision of a dry run, unless the one before led to the same layout."""
        last = self.dry_run[-1].layout if self.dry_run else None
        if decision is not None and decision.layout != last:
            self.dry_run.append(decision)
