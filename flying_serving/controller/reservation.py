"""The room that engines keep for the next long request (Gyges, arXiv 2509.19729, section 5: the
paper's `check_reserve` and `update_reserve`).

A request is *long* if one engine cannot hold it. While no group serves such requests, the engines
that would join for the next one do not fill up with shorter requests, if engines are left for
these. The paper's text leaves open how much room, and for how long: as much as the longest request
of the last `KEPT_S` needs.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from flying_serving.controller.loads import Loads
from flying_serving.controller.requests import RequestState
from flying_serving.controller.settings import Settings
from flying_serving.layout.groups import Group, Layout
from flying_serving.policy.transformations import PART_BELOW

KEPT_S = 300.0
"""Seconds after a long request has arrived for which room is kept for another one like it."""
PATIENCE_S = 3.0
"""Seconds after its arrival from which a request that finds no other room may have the room that is
kept. It may sooner if its deadline is near.
"""


class LongRequest(NamedTuple):
    """A long request that has arrived, and when."""

    tokens: float
    size: int
    arrived_s: float


class Reservation:
    """The engines that keep room, and for how many tokens.

    `group`: the engines that would join, or join now; empty if no room is kept.
    `tokens`: that a long request needs there.
    `is_awaited`: whether a long request waits for room in a wide group.
    `updated_s`: the time as of which they are, and waits count.
    """

    def __init__(self, settings: Settings) -> None:
        self._is_on = settings.policy.joins_for_long and settings.forms_groups
        self._engines = settings.engines
        self._capacity = settings.capacity
        self._narrowest = min(settings.capacity.kv_tokens)
        self._long: list[LongRequest] = []
        self._is_all_wide = self.is_awaited = False
        self.updated_s = 0.0
        self.group: Group = ()
        self.tokens = 0.0

    def is_long(self, request: RequestState) -> bool:
        """Return whether one engine cannot hold a request that asks for no degree."""
        return request.spec.degree is None and request.sizes[0] > self._narrowest

    def arrived(self, request: RequestState, now_s: float) -> None:
        """Note a request that has arrived; only long ones count, where the policy keeps room."""
        if self._is_on and self.is_long(request):
            new = LongRequest(request.likely_tokens, request.sizes[0], now_s)
            # shorter ones that came before tell nothing more
            self._long = [one for one in self._long if one.tokens > new.tokens] + [new]

    def update(
        self,
        layout: Layout,
        loads: Loads,
        now_s: float,
        joining: Iterable[Group] = (),
        waiting: Callable[[], Iterable[RequestState]] = tuple,
    ) -> None:
        """Choose the engines again: those that join now, or else have least to do.

        None keep room while a group is there that serves the next long request, or if none would
        be left for shorter ones. `waiting`: returns the first request of each kind that waits.
        """
        if not self._is_on:
            return
        self.updated_s = now_s
        self._is_all_wide = all(len(group) > self._narrowest for group in layout.groups)
        self.is_awaited = any(map(self._could_begin, waiting()))
        self._long = [one for one in self._long if now_s - one.arrived_s < KEPT_S]
        self.group, self.tokens = (), 0.0
        if not self._long or layout.widest >= self._long[0].size:
            return
        longest = self._long[0]
        joining = [group for group in joining if len(group) >= longest.size]
        apart = [
            group
            for group in Layout.uniform(self._engines, longest.size).groups
            if layout.engines.issuperset(group)
        ]
        chosen = min(joining or apart, key=lambda group: _tokens(group, loads), default=())
        if chosen and not layout.engines.issubset(chosen):
            most_tokens = self._capacity.most_tokens[len(chosen)]
            self.group, self.tokens = chosen, min(longest.tokens, most_tokens)

    def keeps_out(
        self,
        request: RequestState,
        group: Group,
        booked_tokens: float,
        loads: Loads,
        *,
        patient: bool,
    ) -> bool:
        """Return whether a group is kept from a request, of which `booked_tokens` would be booked.

        An engine takes a `patient` request only if the kept room is left beside it. Three kinds are
        never kept out: urgent requests, requests for a degree, and suspects of killing engines.
        """
        spec = request.spec
        if not self._is_on or spec.urgent or spec.degree is not None:
            return False
        if request.is_suspect or self.is_long(request):
            return False
        if len(group) > self._narrowest:
            return self._is_to_part(group, booked_tokens, loads, patient=patient)
        if group[0] not in self.group or not patient:
            return False
        room_tokens = self._room_tokens(len(self.group)) - _tokens(self.group, loads)
        return room_tokens - booked_tokens < self.tokens

    def is_impatient(self, request: RequestState) -> bool:
        """Return whether a request has waited for so long that it may have the room, or has its
        deadline soon.
        """
        waited_s, deadline_s = self.updated_s - request.arrived_s, request.spec.deadline_s
        patience_s = PATIENCE_S
        if deadline_s is not None and not request.admitted:
            patience_s = min(PATIENCE_S, max(deadline_s - PATIENCE_S, deadline_s / 2))
        return waited_s >= patience_s

    def _could_begin(self, request: RequestState) -> bool:
        """Return whether a request is long, and a group has room for it that lends nothing."""
        usual_tokens = self._capacity.kv_tokens.values()
        return self.is_long(request) and request.needed_tokens <= max(usual_tokens)

    def _is_to_part(
        self, group: Group, booked_tokens: float, loads: Loads, *, patient: bool
    ) -> bool:
        """Return whether a wide group refuses a request that is not long, so that it can part.

        It refuses none beside long requests, which keep it from parting, nor beside urgent ones
        where no engine is alone. Otherwise it refuses all while a long request waits, `patient`
        ones where engines are alone, and those with which it would need too much memory to part.
        """
        work = loads[group]
        if work.wide or (work.urgent and self._is_all_wide):
            return False
        takes = not self.is_awaited and (self._is_all_wide or not patient)
        most_tokens = PART_BELOW * len(group) * self._capacity.kv_tokens[self._narrowest]
        return not takes or work.committed_tokens + booked_tokens > most_tokens

    def _room_tokens(self, size: int) -> int:
        """Return the tokens that a group has for the longest request: those of its weights only if
        the request needs them.
        """
        kv_tokens = self._capacity.kv_tokens[size]
        return kv_tokens if self.tokens <= kv_tokens else self._capacity.most_tokens[size]


def _tokens(group: Group, loads: Loads) -> float:
    """Return the tokens that are booked for the requests of some engines, in all their groups."""
    groups = {other for engine in group for other in loads.of_engine(engine)}
    return sum(loads[other].committed_tokens for other in groups)
