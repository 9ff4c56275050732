"""Routers of stock vLLM and of others, in place of the choice of our controller. None of them knows
how urgent a request is, nor how long.
"""

from collections.abc import Mapping
from typing import Any

from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.requests import RequestState
from flying_serving.layout.groups import Group, Layout


class FewestInFlight(GroupChoice):
    """As stock vLLM's router (`DPLBAsyncMPClient.get_core_engine_for_request`): the engine with the
    fewest requests in flight. Of equal ones the first, from one engine later for each request.

    vLLM adds a penalty for requests that wait on an engine whose KV cache is more than half full.
    That is left out, since all engines of a simulated load are alike.
    """

    _next = 0

    def choose(self, request: RequestState, layout: Layout, *_: Any, **__: Any) -> Group:
        """Return the first group with the fewest requests, from the next one in turn."""
        groups = layout.groups
        in_turn = [(self._next + index) % len(groups) for index in range(len(groups))]
        chosen = min(in_turn, key=lambda index: len(self.state.loads[groups[index]].requests))
        self._next += 1
        return groups[chosen]


class RoundRobin(GroupChoice):
    """A choice of one group after the other."""

    _next = 0

    def choose(self, request: RequestState, layout: Layout, *_: Any, **__: Any) -> Group:
        """Return the next group in turn."""
        self._next += 1
        return layout.groups[(self._next - 1) % len(layout.groups)]


ROUTERS: Mapping[str, type[GroupChoice]] = {"round-robin": RoundRobin}
