"""Routers that do not know of groups, for servers whose engines join (Gyges, arXiv 2509.19729,
section 6.2.4).

A router chooses an instance for each request, whatever its length. If the instance cannot hold the
request, engines join for it, though another group may be there that can. Which engines join is the
choice of the product's policy.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.requests import RequestState
from flying_serving.controller.state import ClusterState
from flying_serving.layout.groups import Group, Layout
from flying_serving.predict.work import LaneFigures


class Unaware(GroupChoice, ABC):
    """Chooses one instance for each request, once, by its first engine."""

    def __init__(self, state: ClusterState) -> None:
        super().__init__(state)
        self._engine_of: dict[str, int] = {}
        self._groups_before: dict[str, set[Group]] = {}
        """The groups that there were when the instance of a request could not hold it."""

    @abstractmethod
    def routed(self, groups: Sequence[Group]) -> Group:
        """Return the router's choice."""

    def choose(
        self,
        request: RequestState,
        layout: Layout,
        lanes: Mapping[int, LaneFigures],
        expected_tokens: float,
    ) -> Group | None:
        """Return the router's group if it holds a request, otherwise one that was formed since for
        the request. Where no engines are left to join, any will do.

        A group that is full lends its weights, as one of the product does for a request that waits.
        """
        name, groups = request.request_id, self.state.layout.groups
        if name not in self._engine_of:
            self._engine_of[name] = self.routed(groups)[0]
        mine = [self.state.layout.group_of(self._engine_of[name])]
        if len(mine[0]) not in request.sizes:
            before = self._groups_before.setdefault(name, set(groups))
            holding = [group for group in groups if len(group) in request.sizes]
            all_hold = len(holding) == len(groups)
            mine = holding if all_hold else [one for one in holding if one not in before]
        free = Layout(tuple(group for group in mine if group in layout.groups))
        chosen = super().choose(request, free, lanes, expected_tokens)
        rooms = self.state.rooms
        if chosen in rooms.extra and rooms.has_extra:
            tokens = self.state.loads[chosen].committed_tokens + expected_tokens
            if tokens > self.capacity.kv_tokens[len(chosen)]:
                rooms.awaited.add(chosen)
        return chosen

    def needs_another_group(self, request: RequestState) -> bool:
        """Return whether the instance of a request cannot hold it, and no group was formed since
        that can.
        """
        before = self._groups_before.get(request.request_id)
        return before is not None and not any(
            len(group) in request.sizes and group not in before
            for group in self.state.layout.groups
        )


class RoundRobin(Unaware):
    """One instance after the other."""

    _next = 0

    def routed(self, groups: Sequence[Group]) -> Group:
        """Return the next instance in turn."""
        self._next += 1
        return groups[(self._next - 1) % len(groups)]


class LeastLoad(Unaware):
    """The instance with the least KV memory in use, for each engine."""

    def routed(self, groups: Sequence[Group]) -> Group:
        """Return the first of the instances with the fewest tokens booked for each engine."""
        loads = self.state.loads
        return min(groups, key=lambda group: loads[group].committed_tokens / len(group))
