"""The room that engines keep for the next long request (Gyges, arXiv 2509.19729, section 5: the
paper's `check_reserve` and `update_reserve`).

A request is *long* if one engine cannot hold it. While no group serves such requests, the engines
that would join for the next one do not fill up with shorter requests. The paper's text leaves open
how much room, and for how long: as much as the longest request of the last `KEPT_S` needs.
"""

from collections.abc import Iterable
from typing import NamedTuple

from flying_serving.controller.loads import Loads
from flying_serving.controller.requests import RequestState
from flying_serving.controller.settings import Settings
from flying_serving.layout.groups import Group, Layout

KEPT_S = 300.0
"""Seconds after a long request has arrived for which room is kept for another one like it."""
PATIENCE_S = 3.0
"""Seconds after which a request that found no other room may have the room that is kept."""


class LongRequest(NamedTuple):
    """A long request that has arrived, and when."""

    tokens: float
    size: int
    arrived_s: float


class Reservation:
    """The engines that keep room, and for how many tokens.

    `group`: the engines that would join, or join now; empty if no room is kept.
    `tokens`: that a long request needs there.
    """

    def __init__(self, settings: Settings) -> None:
        self._keeps_room = settings.policy.keeps_room and settings.forms_groups
        self._engines = settings.engines
        self._most_tokens = settings.capacity.most_tokens
        self._narrowest = min(settings.capacity.kv_tokens)
        self._long: list[LongRequest] = []
        self._now_s = 0.0
        self.group: Group = ()
        self.tokens = 0.0

    def is_long(self, request: RequestState) -> bool:
        """Return whether one engine cannot hold a request that asks for no degree."""
        return request.spec.degree is None and request.sizes[0] > self._narrowest

    def arrived(self, request: RequestState, now_s: float) -> None:
        """Note a request that has arrived; only long ones count, where the policy keeps room."""
        if self._keeps_room and self.is_long(request):
            new = LongRequest(request.likely_tokens, request.sizes[0], now_s)
            # shorter ones that came before tell nothing more
            self._long = [one for one in self._long if one.tokens > new.tokens] + [new]

    def update(
        self, layout: Layout, loads: Loads, now_s: float, joining: Iterable[Group] = ()
    ) -> None:
        """Choose the engines again: those that join now, or else have least to do.

        None keep room while a group of several engines is there, which serves the next one.
        """
        self._now_s = now_s
        self._long = [one for one in self._long if now_s - one.arrived_s < KEPT_S]
        self.group, self.tokens = (), 0.0
        if not self._long or layout.widest > self._narrowest:
            return
        longest = self._long[0]
        joining = [group for group in joining if len(group) >= longest.size]
        apart = [
            group
            for group in Layout.uniform(self._engines, longest.size).groups
            if layout.engines.issuperset(group)
        ]
        chosen = min(joining or apart, key=lambda group: _tokens(group, loads), default=())
        self.group, self.tokens = chosen, longest.tokens if chosen else 0.0

    def keeps_out(
        self, request: RequestState, group: Group, booked_tokens: float, loads: Loads
    ) -> bool:
        """Return whether a group is not for a request, of which `booked_tokens` would be booked.

        A wide group is for long requests, and for others only beside these, as it is to part. An
        engine takes a request only if the kept room is left beside it. Urgent requests are kept out
        of nothing, nor are those for a degree, and those that may have killed engines.
        """
        spec = request.spec
        if spec.urgent or spec.degree is not None or request.is_suspect or self.is_long(request):
            return False
        if len(group) > self._narrowest:
            return not loads[group].wide
        if group[0] not in self.group:
            return False
        room_tokens = self._most_tokens[len(self.group)] - _tokens(self.group, loads)
        return room_tokens - booked_tokens < self.tokens

    def is_impatient(self, request: RequestState) -> bool:
        """Return whether a request has waited for so long that it may have the room."""
        return self._now_s - request.arrived_s >= PATIENCE_S


def _tokens(group: Group, loads: Loads) -> float:
    """Return the tokens that are booked for the requests of some engines, in all their groups."""
    groups = {other for engine in group for other in loads.of_engine(engine)}
    return sum(loads[other].committed_tokens for other in groups)
