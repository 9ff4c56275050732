"""Dispatch of waiting requests to groups of the layout; a request that fills its group waits for
another.
"""

from collections.abc import Mapping

from flying_serving.controller.admission import Pace
from flying_serving.controller.bookings import Bookings
from flying_serving.controller.commands import Command, Reject
from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.requests import RequestState
from flying_serving.controller.splitter import Splitter
from flying_serving.controller.state import ClusterState
from flying_serving.layout.groups import Group, KVSource, Layout
from flying_serving.predict.work import LaneFigures


class Dispatcher:
    """Offers groups to the requests of the pool. `pace` counts requests that get their first
    group.
    """

    def __init__(
        self,
        state: ClusterState,
        choice: GroupChoice,
        bookings: Bookings,
        splitter: Splitter,
        pace: Pace,
    ) -> None:
        self._state = state
        self._choice = choice
        self._bookings = bookings
        self._splitter = splitter
        self._pace = pace

    def take_in(self, request: RequestState, now_s: float) -> None:
        """Let a request wait that has arrived.

        If it is long, the group that the last switch formed for a long request is needed again.
        """
        state = self._state
        state.pool.add(state.lengths.set_sizes_of_new(request, state.formable))
        state.deadlines.add(request)
        state.reservation.arrived(request, now_s)
        if state.reservation.is_long(request):
            state.switches.needed_again(now_s)

    def dispatch_waiting(self, now_s: float, *, splits: bool) -> list[Command]:
        """Offer groups of the layout to the requests that wait, in the pool's order.

        With `splits` a request may get two groups. All groups that suit a request without room are
        reserved for it, as in vLLM. Without that, a long request would never see enough memory free
        at once as long as short ones arrive.
        """
        state = self._state
        state.rooms.forget_waits()
        state.crowded_out = set()
        self._update_reservation(now_s)
        if not len(state.pool):
            return []
        commands: list[Command] = []
        lanes = state.lane_figures()
        reserved: set[Group] = set()

        def dispatch(request: RequestState) -> bool:
            group = self._group_for(request, lanes, reserved)
            if group is None:
                reserved.update(self._wait_for_room(request, now_s))
                if self._choice.needs_another_group(request):
                    state.crowded_out.add(request.sizes)
                return False
            if not request.admitted:
                self._pace.dispatched()
            if splits:
                commands.extend(self._splitter.begin(request, group, lanes, reserved))
            else:
                commands.append(self._bookings.start(request, group, lanes))
            return True

        state.pool.hand_out(dispatch, now_s)
        if state.reservation.is_awaited:
            self._update_reservation(now_s)
            if not state.reservation.is_awaited:  # the group of a long request takes others now
                state.pool.hand_out(dispatch, now_s)
        return commands

    def _update_reservation(self, now_s: float) -> None:
        state = self._state
        state.reservation.update(
            state.layout, state.loads, now_s, state.switches.joining, state.pool.first_of_each_kind
        )

    def _group_for(
        self, request: RequestState, lanes: Mapping[int, LaneFigures], reserved: set[Group]
    ) -> Group | None:
        """Return the best group with room that is not reserved for others."""
        free = self._state.layout
        if reserved:
            free = Layout(tuple(group for group in free.groups if group not in reserved))
        expected_tokens = self._state.lengths.expected_tokens(request)
        group = self._choice.choose(request, free, lanes, expected_tokens)
        # a degree may get a group that the layout lacks
        return None if group in reserved else group

    def _wait_for_room(self, request: RequestState, now_s: float) -> list[Group]:
        """Let a request wait for room in groups. Returns these: other requests may not have them.

        It may wait for extra room instead, or for narrower groups; then `Rooms` gets to know. A
        suspect reserves only groups that are short of memory: in the others it waits for other
        suspects. A request for a degree that the layout lacks reserves groups that are short of
        memory once it is overdue.
        """
        state = self._state
        state.rooms.note_wait(request, state.layout)
        state.rooms.awaited |= self._choice.extra_room_for(request)

        expected_tokens = state.lengths.expected_tokens(request)
        waits_for_degree = request.lacks_group(state.layout)
        if request.is_suspect or (waits_for_degree and state.pool.is_overdue(request, now_s)):
            return self._choice.short_of_memory(request, state.layout, expected_tokens)
        return [
            group
            for group in state.layout.groups
            if len(group) in request.sizes
            and state.rooms.tokens(group) >= request.needed_tokens
            and self._choice.is_for(request, group, expected_tokens)
        ]

    # ---- ends

    def end(self, request_id: str, now_s: float, *, aborted: bool) -> list[Command]:
        """End a request that is over, in the pool or in a group."""
        state = self._state
        commands = self._splitter.end(request_id)
        state.deadlines.drop(request_id)
        state.pool.remove(request_id)
        state.switches.ended(request_id, now_s)  # a request that waits may have streamed before

        request = state.started.pop(request_id, None)
        if request is not None:
            # vLLM ends a request whose stop string has come as it ends an aborted one
            if request.output_tokens or not aborted:
                state.demand.finished(request.output_tokens)
            state.loads.remove(request)
        return commands

    def reject_expired(self, now_s: float) -> list[Command]:
        """Reject the requests that no scheduler has had by their deadlines."""
        expired = self._state.deadlines.take_expired(now_s)
        commands: list[Command] = [
            Reject(request.request_id, now_s - request.arrived_s, request.group)
            for request in expired
        ]
        for request in expired:
            commands += self.end(request.request_id, now_s, aborted=True)
        return commands

    # ---- a full group

    def group_full(self, request: RequestState, now_s: float) -> list[Command] | None:
        """Let another group go on with a request that has as many tokens as it may have in its
        group.

        At a split that is the second group. Returns None if the request ends, as in vLLM. It ends
        if it is as long as its group holds, and no wider group for it is there or will be formed.
        """
        if handed_off := self._splitter.hand_off(request, now_s):
            return handed_off

        state, group = self._state, request.group
        assert group is not None
        is_full = state.rooms.tokens(group) <= request.context_tokens
        kv = None if request.offer is None else KVSource(group, request.offer)

        if self._has_wider(request):
            commands = self._splitter.undo(request.request_id)
            self._bookings.requeue(request, now_s, kv)
            return commands
        if is_full or not request.spec.can_migrate:
            return None
        # its split was undone, or its group holds more by now; no other group may have it
        self._bookings.suspend(request, now_s, kv)
        return [self._bookings.start(request, group, state.lane_figures())]

    def _has_wider(self, request: RequestState) -> bool:
        """Return whether a group that holds more tokens of a request is there, or will be
        formed.
        """
        state = self._state
        sizes = set(request.fitting(state.settings.capacity.most_tokens))
        if not state.settings.forms_groups:
            sizes &= state.sizes_ahead
        return bool(sizes) and state.lengths.goes_on(request)
