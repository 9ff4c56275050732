"""The choice of a request's group by memory, for policies whose engines keep room for long requests
(Gyges' algorithm 1).
"""

from collections.abc import Mapping

from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.requests import RequestState
from flying_serving.layout.groups import Group, Layout
from flying_serving.predict.migrations import MigrationCost
from flying_serving.predict.work import LaneFigures


class ReservingChoice(GroupChoice):
    """Chooses the group with the least KV memory in use, of those that keep no room from the
    request.

    If no group is for the request, or it has waited for long, all groups are.
    """

    def choose(
        self,
        request: RequestState,
        layout: Layout,
        lanes: Mapping[int, LaneFigures],
        expected_tokens: float,
    ) -> Group | None:
        """Return the group for a request, or None if no suitable group has room for it."""
        its_own = [group for group in layout.groups if self.is_for(request, group, expected_tokens)]
        chosen = super().choose(request, Layout(tuple(its_own)), lanes, expected_tokens)
        if chosen is None and (not its_own or self.state.reservation.is_impatient(request)):
            return super().choose(request, layout, lanes, expected_tokens)
        return chosen

    def is_for(self, request: RequestState, group: Group, expected_tokens: float) -> bool:
        """Return whether a group keeps no room from a request."""
        booked_tokens = self.booked_tokens(request, group, expected_tokens)
        reservation, loads = self.state.reservation, self.state.loads
        return not reservation.keeps_out(request, group, booked_tokens, loads)

    def lending_for(self, request: RequestState) -> set[Group]:
        """Return the groups that have no room for a long request beside other long ones, and would
        have it with the room of their weights.
        """
        if not self.state.reservation.is_long(request):
            return set()
        loads, capacity = self.state.loads, self.capacity
        whole_tokens = {
            group: capacity.kv_tokens[len(group)]
            for group in self.state.weight_lending.phases
            if group in self.state.layout.groups and loads[group].wide
        }
        tokens = request.likely_tokens
        return {
            group
            for group, room_tokens in whole_tokens.items()
            if room_tokens < loads[group].committed_tokens + tokens <= capacity.lent_tokens
        }

    def needs_another_group(self, request: RequestState) -> bool:
        """Return whether each group that is wide enough lacks room for a long request beside other
        long ones, which may run for long.
        """
        loads = self.state.loads
        wide = [group for group in self.state.layout.groups if len(group) in request.sizes]
        return self.state.reservation.is_long(request) and all(
            loads[group].wide
            and loads[group].committed_tokens + request.likely_tokens
            > self.capacity.most_tokens[len(group)]
            for group in wide
        )

    def _price(
        self,
        request: RequestState,
        group: Group,
        lanes: Mapping[int, LaneFigures],
        migration: MigrationCost | None,
        expected_tokens: float,
    ) -> float:
        """Return the tokens that are booked in a group, for each engine."""
        return self.state.loads[group].committed_tokens / len(group)
