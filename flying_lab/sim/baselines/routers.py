"""Routers that count requests only, in place of the choice of our controller."""

from collections.abc import Mapping
from typing import Any

from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.requests import RequestState
from flying_serving.layout.groups import Group, Layout


class RoundRobin(GroupChoice):
    """One group after the other."""

    _next = 0

    def place(self, request: RequestState, layout: Layout, *_: Any, **__: Any) -> Group:
        """The next one."""
        self._next += 1
        return layout.groups[(self._next - 1) % len(layout.groups)]


class LeastLoad(GroupChoice):
    """The group with the fewest requests."""

    def place(self, request: RequestState, layout: Layout, *_: Any, **__: Any) -> Group:
        """The first of those with the fewest."""
        return min(layout.groups, key=lambda group: len(self.state.loads[group].requests))


ROUTERS: Mapping[str, type[GroupChoice]] = {"round-robin": RoundRobin, "least-load": LeastLoad}
