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

    `tokens_left`: mean output tokens to go; `longest_left`: those of the request that ends last. `context_tokens`:
    mean. `prefill_tokens`: to compute, of all requests; `prompts`: requests with any. `bound`: by number of engines,
    the load of the requests that fewer engines cannot hold.
    """

    requests: int
    tokens_left: float
    longest_left: float
    context_tokens: float
    prefill_tokens: int = 0
    prompts: int = 0
    bound: Mapping[int, GroupLoad] = field(default_factory=dict)

    def stragglers(self, layout: Layout) -> GroupLoad | None:
        """The requests that no group of `layout` can hold: they stay in their own group until they end."""
        return self.bound.get(2 * layout.widest)


@dataclass(frozen=True)
class Need:
    """A group of `least_size` engines or more that some request needs; `reason`: for the log.

    `urgent`: whether the reason is the request's priority; else it is its length.
    """

    least_size: int
    urgent: bool
    reason: str


@dataclass(frozen=True)
class Snapshot:
    """The cluster at `now_s`.

    `layouts`: every layout that may be chosen. `lanes`: by group size, what a group can do. `loads`: requests by group,
    in the present layout and in older ones that drain. `work`: requests that wait or are expected. `needs`: groups that
    a layout must have. `promised`: request-seconds that recent switches for load were to gain, and have not had the
    time to.
    """

    now_s: float
    layout: Layout
    layouts: Sequence[Layout]
    lanes: Mapping[int, LaneFigures]
    loads: Mapping[Group, GroupLoad]
    work: Work
    needs: Sequence[Need] = ()
    promised: float = 0.0


@dataclass(frozen=True)
class Decision:
    """A change of the layout.

    `gain`: predicted request-seconds saved over the horizon; infinite if a request cannot run otherwise. `cost`: those
    of the switch, `considered`: by mode. `stay`: those over the horizon if the layout stayed, `least_gain`: what `gain`
    had to exceed; both None if the switch is not for load. `drain_s`: predicted seconds until the last request of the
    old layout has ended, if nothing else runs.
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
