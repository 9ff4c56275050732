"""A policy's input, the state of the cluster at one moment, and its answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flying_serving.layout.groups import Group, Layout
from flying_serving.predict.work import LaneFigures, Work

LATER = "later"
"""As the mode of a switch: wait until the requests that only the present groups hold have ended."""


@dataclass(frozen=True)
class GroupLoad:
    """The requests that run in one group.

    Args:
        requests: their number.
        tokens_left: output tokens to go, mean.
        longest_tokens_left: output tokens to go of the request that ends last.
        context_tokens: tokens so far, mean.
        prefill_tokens: prompt tokens to compute, of all requests.
        prompts: requests that have prompt tokens to compute.
        by_least_size: by number of engines, the load of the requests that fewer engines cannot
            hold.
        urgent: urgent requests among them.
        booked_tokens: tokens of KV that are booked for them.
    """

    requests: int
    tokens_left: float
    longest_tokens_left: float
    context_tokens: float
    prefill_tokens: int = 0
    prompts: int = 0
    by_least_size: Mapping[int, GroupLoad] = field(default_factory=dict)
    urgent: int = 0
    booked_tokens: float = 0.0

    def stragglers(self, layout: Layout) -> GroupLoad | None:
        """Return the requests that no group of `layout` can hold: they stay in their own group
        until they end.
        """
        return self.by_least_size.get(2 * layout.widest)


@dataclass(frozen=True)
class Need:
    """A group that some request needs.

    Args:
        least_size: the least number of its engines.
        urgent: True if the reason is the request's priority, False if it is its length.
        reason: for the log.
        waiting: of urgent requests, those for which no group has room.
        crowded_out: of long requests, those for which groups that are wide enough have no room
            beside others.
        lends: True if the group has to lend its weights for the request, which waits until narrower
            groups of the engines have nothing to do.
    """

    least_size: int
    urgent: bool
    reason: str
    waiting: int = 0
    crowded_out: int = 0
    lends: bool = False


@dataclass(frozen=True)
class Snapshot:
    """The cluster at one time.

    Args:
        now_s: the time, by the controller's clock.
        layout: the present layout.
        layouts: every layout that may be chosen.
        lane_figures: by group size, the abilities of a group.
        loads: requests by group, in the present layout and in older ones that drain.
        work: requests that wait or are expected.
        needs: groups that a layout must have.
        promised: request-seconds that a switch has to gain more because of recent ones for long
            requests (`Decision.promise`).
        regret: request-seconds that the present layout is predicted to have lost to better ones.
        recent_switches: number of switches for load in the last minute.
        shortfalls: by size of the widest group of a layout, the share of what staying costs that
            switches to it have gained less than predicted of late.
        opens_in_s: of widest groups that lend their weights, the seconds until narrower ones could
            have them.
    """

    now_s: float
    layout: Layout
    layouts: Sequence[Layout]
    lane_figures: Mapping[int, LaneFigures]
    loads: Mapping[Group, GroupLoad]
    work: Work
    needs: Sequence[Need] = ()
    promised: float = 0.0
    regret: float = 0.0
    recent_switches: int = 0
    shortfalls: Mapping[int, float] = field(default_factory=dict)
    opens_in_s: Mapping[Group, float] = field(default_factory=dict)

    def closed_s(self, layout: Layout) -> float:
        """Return the seconds until all groups of a layout could have their weights."""
        return max(
            (time_s for group, time_s in self.opens_in_s.items() if group not in layout.groups),
            default=0.0,
        )


@dataclass(frozen=True)
class Decision:
    """The best change of the layout, and whether it is made.

    Its figures are predicted request-seconds, but for `drain_s`. `stay` and `promised` are None if
    the switch is not for load. If `gain` is too small at any cost, `mode` and `considered` are
    empty.

    Args:
        layout: the best other layout.
        mode: the cheapest mode of the switch to it.
        reason: for the log and for operators.
        gain: saved over the horizon; infinite if a request cannot run otherwise.
        cost: of the switch.
        considered: the cost of the switch by mode.
        stay: the prediction if the layout stays.
        least_gain: the bound that `gain` has to exceed.
        drain_s: seconds until the last request of the old layout has ended, if no other requests
            run.
        promised: the part of `least_gain` from earlier switches.
        unsure_at: a rate of arrivals per second, within one standard deviation of the predicted
            one, at which the switch would not gain enough. None if there is none.
        predicted: the prediction for each layout that was compared.
        request_seconds: of a switch for load: the prediction for `layout` alone, in which first
            tokens have no weight of their own.
        promise: of a switch for a long request, the gain of going back at once. At first a switch
            for load must gain that much more, since the next long request may be near.
    """

    layout: Layout
    mode: str
    reason: str
    gain: float
    cost: float
    considered: Mapping[str, float] = field(default_factory=dict)
    stay: float | None = None
    least_gain: float | None = None
    drain_s: float = math.inf
    promised: float | None = None
    unsure_at: float | None = None
    predicted: Mapping[Layout, float] = field(default_factory=dict)
    request_seconds: float | None = None
    promise: float = 0.0

    @property
    def is_made(self) -> bool:
        """True if the change gains enough at all rates of arrivals that are likely, and does not
        have to wait for requests that only the present groups hold.
        """
        return self.mode != LATER and self.gains_enough and self.unsure_at is None

    @property
    def gains_enough(self) -> bool:
        """True if the change gains enough at the predicted rate of arrivals."""
        return self.least_gain is None or self.gain > self.least_gain
