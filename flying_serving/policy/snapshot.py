"""What a policy sees: the state of the cluster at one moment, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flying_serving.layout.groups import Group, Layout
from flying_serving.predict.work import LaneFigures, Work


@dataclass(frozen=True)
class GroupLoad:
    """The requests that run in one group.

    Args:
        requests: how many.
        tokens_left: output tokens that each of them still has to get, on average.
        longest_left: output tokens that the last of them still has to get.
        context_tokens: tokens that each of them has, on average.
        prefill_tokens: prompt tokens that are not done, of all of them.
        prompts: how many of them have such.
        bound: by a number of engines, those of them that fewer cannot hold; none if there is no such request.
    """

    requests: int
    tokens_left: float
    longest_left: float
    context_tokens: float
    prefill_tokens: int = 0
    prompts: int = 0
    bound: Mapping[int, GroupLoad] = field(default_factory=dict)

    def staying(self, layout: Layout) -> GroupLoad | None:
        """Those of them that no group of `layout` can hold: they go on in their own until their end."""
        return self.bound.get(2 * layout.widest)


@dataclass(frozen=True)
class Need:
    """A group that some request cannot do without.

    Args:
        least_size: engines that it needs at least.
        urgent: whether it is there for priority rather than for room.
        reason: for the log.
    """

    least_size: int
    urgent: bool
    reason: str


@dataclass(frozen=True)
class Snapshot:
    """The cluster at `now_s`.

    Args:
        layout: the present one.
        layouts: every layout that may be chosen.
        lanes: by group size, what a group can do.
        loads: requests by group, in the present layout and in older ones that drain.
        work: requests that wait or are expected.
        needs: groups that a layout must have.
        recent_switches: switches for load in the last minute, each less the longer ago it was.
        came_back: whether such a layout was left for load in the last minute, for one that gets prompts done slower.
    """

    now_s: float
    layout: Layout
    layouts: Sequence[Layout]
    lanes: Mapping[int, LaneFigures]
    loads: Mapping[Group, GroupLoad]
    work: Work
    needs: Sequence[Need] = ()
    recent_switches: float = 0.0
    came_back: bool = False


@dataclass(frozen=True)
class Decision:
    """Change the layout.

    Args:
        layout: to this one.
        mode: in this way.
        reason: for the log, with the use case first.
        gain: request-seconds saved over the horizon, as predicted; infinite if a request cannot run otherwise.
        cost: request-seconds that the switch costs, as predicted.
        considered: predicted cost of every way to switch.
        stay: request-seconds over the horizon if the layout stayed, as predicted; None if that was not asked.
        drain_s: until the last request of the old layout has ended, as predicted, if nothing else runs.
        slower: whether prompts that queue get done slower there.
    """

    layout: Layout
    mode: str
    reason: str
    gain: float
    cost: float
    considered: Mapping[str, float] = field(default_factory=dict)
    stay: float | None = None
    drain_s: float = math.inf
    slower: bool = False

    @property
    def for_load(self) -> bool:
        """Whether the layout is predicted to do better with the load, rather than needed by a request."""
        return self.stay is not None
