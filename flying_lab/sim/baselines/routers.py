"""Routers that count requests only, in place of the placing of our controller."""

from collections.abc import Mapping
from typing import Any

from flying_serving.controller.loads import Loads
from flying_serving.controller.placing import Placing
from flying_serving.controller.requests import RequestState
from flying_serving.layout.groups import Group, Layout


class RoundRobin(Placing):
    """One group after the other."""

    _next = 0

    def place(self, state: RequestState, layout: Layout, *_: Any, **__: Any) -> Group:
        """The next one."""
        self._next += 1
        return layout.groups[(self._next - 1) % len(layout.groups)]


class LeastLoad(Placing):
    """The group with the fewest requests."""

    def place(self, state: RequestState, layout: Layout, loads: Loads, *_: Any, **__: Any) -> Group:
        """The first of those with the fewest."""
        return min(layout.groups, key=lambda group: len(loads[group].requests))


ROUTERS: Mapping[str, type[Placing]] = {"round-robin": RoundRobin, "least-load": LeastLoad}
