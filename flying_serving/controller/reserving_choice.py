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
    request. If none has room, and the request has waited for long, groups that keep room come next.
    """

    def choose(
        self,
        request: RequestState,
        layout: Layout,
        lanes: Mapping[int, LaneFigures],
        expected_tokens: float,
    ) -> Group | None:
        """Return the group for a request, or None if no suitable group has room for it."""
        free = self._free(request, layout, expected_tokens, patient=True)
        chosen = super().choose(request, free, lanes, expected_tokens)
        if chosen is None and self.state.reservation.is_impatient(request):
            free = self._free(request, layout, expected_tokens, patient=False)
            chosen = super().choose(request, free, lanes, expected_tokens)
        return chosen

    def is_for(self, request: RequestState, group: Group, expected_tokens: float) -> bool:
        """Return whether a group keeps no room from a request that has waited as long as this."""
        patient = not self.state.reservation.is_impatient(request)
        return not self._is_kept_out(request, group, expected_tokens, patient=patient)

    def _free(
        self, request: RequestState, layout: Layout, expected_tokens: float, *, patient: bool
    ) -> Layout:
        """Return the groups of `layout` that keep no room from a request."""
        free = [
            group
            for group in layout.groups
            if not self._is_kept_out(request, group, expected_tokens, patient=patient)
        ]
        return Layout(tuple(free))

    def _is_kept_out(
        self, request: RequestState, group: Group, expected_tokens: float, *, patient: bool
    ) -> bool:
        booked_tokens = self.booked_tokens(request, group, expected_tokens)
        reservation, loads = self.state.reservation, self.state.loads
        return reservation.keeps_out(request, group, booked_tokens, loads, patient=patient)

    def extra_room_for(self, request: RequestState) -> set[Group]:
        """Return the groups that have no room for a long request beside others, and would have it
        with their extra room.
        """
        if not self.state.reservation.is_long(request):
            return set()
        return self.state.rooms.with_extra(request.likely_tokens, self.state.layout)

    def needs_another_group(self, request: RequestState) -> bool:
        """Return whether each group that is wide enough lacks room for a long request beside other
        long ones, which may run for long.
        """
        loads = self.state.loads
        wide = [group for group in self.state.layout.groups if len(group) in request.sizes]
        if not wide or not self.state.reservation.is_long(request):
            return False
        return all(
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
