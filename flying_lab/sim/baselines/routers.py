"""Routers that count requests only, in place of the choice of our controller."""

from collections.abc import Mapping
from typing import Any

from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.requests import RequestState
from flying_serving.layout.groups import Group, Layout


class RoundRobin(GroupChoice):
    """A choice of one group after the other."""

    _next = 0

    def choose(self, request: RequestState, layout: Layout, *_: Any, **__: Any) -> Group:
        """Return the next group in turn."""
        self._next += 1
        return layout.groups[(self._next - 1) % len(layout.groups)]


class LeastLoad(GroupChoice):
    """A choice of the group with the fewest requests."""

    def choose(self, request: RequestState, layout: Layout, *_: Any, **__: Any) -> Group:
        """Return the first group of all with the fewest requests."""
        return min(layout.groups, key=lambda group: len(self.state.loads[group].requests))


ROUTERS: Mapping[str, type[GroupChoice]] = {"round-robin": RoundRobin, "least-load": LeastLoad}
