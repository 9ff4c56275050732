"""Loss and return of engines: their requests go on elsewhere.

A group that lacks an engine is no more: its other members are alone then. No layout has the engine
until it is back.
"""

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from flying_serving.controller.bookings import Bookings
from flying_serving.controller.changeover import Changeover
from flying_serving.controller.commands import Command, Fail
from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.requests import RequestState
from flying_serving.controller.splitter import Splitter
from flying_serving.controller.state import ClusterState
from flying_serving.controller.suspicion import Suspicion, suspected
from flying_serving.layout.groups import Group, Layout

MOST_WAIT_S = 60.0
"""Seconds that a suspect which may not get the last engine waits for another one; then it fails."""


@dataclass
class OrphanCounts:
    """Requests that have lost their group: `requeued` wait for another, `failed` have ended."""

    requeued: int = 0
    failed: int = 0


class FaultRecovery:
    """Takes requests out of groups that have lost an engine, and the engine out of the layout."""

    def __init__(
        self,
        state: ClusterState,
        choice: GroupChoice,
        bookings: Bookings,
        splitter: Splitter,
        changeover: Changeover,
    ) -> None:
        self._state = state
        self._choice = choice
        self._bookings = bookings
        self._splitter = splitter
        self._changeover = changeover
        self.orphans = OrphanCounts()
        # by suspect, the time since which it waits for engines to come back
        self._waits_since_s: dict[str, float] = {}

    # ---- engines are lost

    def engines_lost(
        self, engines: Collection[int], now_s: float, *, killed: bool
    ) -> list[Command]:
        """Take requests from lost engines: they wait again, by their old arrivals, or fail.

        `killed`: True if it is one engine, whose process was killed from outside.
        """
        state = self._state
        state.absent_engines.update(engines)
        self._suspect(engines, killed=killed)

        commands: list[Command] = []
        for request_id, split in list(state.splits.open.items()):
            if self._lacks_engine((*split.kv.group, *split.second)):
                commands += self._splitter.undo(request_id)
        for request in state.pool:
            self._forget_lost_kv(request)
        for request in list(state.started.values()):
            if request.group is not None and self._lacks_engine(request.group):
                commands.append(self._requeue_or_fail(request, now_s))
        for request in state.started.values():
            self._forget_lost_kv(request)

        self._changeover.fail(f"engines {sorted(engines)} were lost", now_s)
        state.switches.void_promises()
        is_fixed = state.settings.dry_run or not state.settings.policy.decides
        if state.to_restore is None and is_fixed:
            state.to_restore = state.layout
        self._set_layout(state.layout)
        self._note_suspects_that_wait(now_s)
        return commands

    def fail_overdue_suspects(self, now_s: float) -> list[Command]:
        """Fail suspects that have waited for too long for engines to come back."""
        if not self._waits_since_s:
            return []
        overdue = [
            request
            for request in self._state.pool
            if now_s - self._waits_since_s.get(request.request_id, now_s) > MOST_WAIT_S
        ]
        return [
            self._fail(request, f"{_lost_while(request)}, and others are not back", now_s)
            for request in overdue
        ]

    def _lacks_engine(self, group: Group) -> bool:
        """Return whether an engine of a group is absent."""
        return not self._state.absent_engines.isdisjoint(group)

    def _forget_lost_kv(self, request: RequestState) -> None:
        """Forget KV that a group with a lost engine offered."""
        if request.kv is not None and self._lacks_engine(request.kv.group):
            request.kv = None

    def _requeue_or_fail(self, request: RequestState, now_s: float) -> Command:
        """Begin a request that has lost its group anew, with the tokens that it has, or fail it."""
        if request.suspicion.is_certain:
            return self._fail(request, _lost_while(request), now_s)
        if request.output_tokens and not request.spec.can_migrate:
            why = "its engine was lost, and another cannot go on with this request"
            return self._fail(request, why, now_s)
        self.orphans.requeued += 1
        return self._bookings.requeue(request, now_s, None)

    def _fail(self, request: RequestState, why: str, now_s: float) -> Fail:
        state, request_id = self._state, request.request_id
        self.orphans.failed += 1
        state.pool.remove(request_id)
        state.started.pop(request_id, None)
        state.deadlines.drop(request_id)
        state.loads.remove(request)
        state.switches.ended(request_id, now_s)
        return Fail(request_id, why)

    # ---- engines are back

    def engine_back(self, engine: int, now_s: float) -> None:
        """Add an engine that works again, alone, also to a layout that is to be formed."""
        state = self._state
        state.absent_engines.discard(engine)
        if state.to_restore is not None:
            state.to_restore = state.to_restore.beside(engine)
        self._changeover.take_in(engine)
        self._set_layout(state.layout.beside(engine))
        for request in state.started.values():
            _trust(request, engine)
        state.pool.revise(lambda request: _trust(request, engine))
        self._note_suspects_that_wait(now_s)

    def take_restored(self) -> Layout | None:
        """Return the layout that is to be made again, once all its engines are there; only once.

        None as well if it is the present layout.
        """
        state, layout = self._state, self._state.to_restore
        if layout is None or self._lacks_engine(tuple(layout.engines)):
            return None
        state.to_restore = None
        return None if layout == state.layout else layout

    # ---- at a loss and at a return

    def _set_layout(self, layout: Layout) -> None:
        """Go on with the engines of `layout` that are there, and choose between their layouts."""
        state = self._state
        state.layout = layout.without(state.absent_engines)
        state.hindsight.forget()
        every = Layout.all(state.settings.engines, state.sizes)
        state.layouts = list(
            dict.fromkeys(layout.without(state.absent_engines) for layout in every)
        )
        state.formable = sorted({size for layout in state.layouts for size in layout.shape})
        state.pool.revise(self._resize)

    def _resize(self, request: RequestState) -> None:
        """Set the group sizes of a request that waits.

        These are sizes that can be formed. Wider ones are among them again when they can be.
        """
        capacity = self._state.settings.capacity
        fitting = [
            size
            for size in capacity.sizes(request.spec)
            if capacity.most_tokens[size] >= request.needed_tokens
        ]
        request.sizes = self._state.lengths.sizes(request, fitting, self._state.formable)

    def _note_suspects_that_wait(self, now_s: float) -> None:
        """Keep since when each suspect that waits may have none of the engines that are there."""
        self._waits_since_s = {
            request.request_id: self._waits_since_s.get(request.request_id, now_s)
            for request in self._state.pool
            if self._choice.must_wait_for_engines(request)
        }

    # ---- suspects

    def _suspect(self, engines: Collection[int], *, killed: bool) -> None:
        """Suspect the requests whose prompts the groups of lost engines may have computed.

        The engine may have been killed from outside: by the kernel for want of memory, or by an
        operator. Then requests are suspected only if they have lost an engine before.
        """
        started = self._state.started
        computing = self._computing(engines)
        # parts that are pulled compute nothing
        requests = [started[name] for name in computing if name in started]
        suspects = [request for request in requests if request.losses or not killed]
        beside = Counter(group for request in suspects for group in computing[request.request_id])

        for request in requests:
            groups = computing[request.request_id]
            if killed and not request.losses:
                request.suspicion = Suspicion.of_killed()
                continue
            members = frozenset(engine for group in groups for engine in group)
            most_beside = max(beside[group] for group in groups)
            request.suspicion = suspected(request.suspicion, most_beside, members)

    def _computing(self, engines: Collection[int]) -> dict[str, set[Group]]:
        """Return the groups of `engines` by request whose prompt, or a part of it, they may have
        computed.

        A prefix counts for its request.
        """
        state = self._state
        prefixes = {
            split.part.request_id: request_id
            for request_id, split in state.splits.open.items()
            if split.in_prompt
        }
        step_tokens = state.settings.limits.max_num_batched_tokens
        computing: defaultdict[str, set[Group]] = defaultdict(set)
        broken = {
            group: work
            for engine in engines
            for group, work in state.loads.of_engine(engine).items()
        }
        for group, work in broken.items():
            # the first in the group may be in the step under way or in the next one
            begun_tokens = 0
            for booked, request in work.requests.items():
                if request.prefill_tokens and begun_tokens < step_tokens:
                    computing[prefixes.get(booked, booked)].add(group)
                begun_tokens += request.prefill_tokens
        return computing


def _trust(request: RequestState, engine: int) -> None:
    """Let a request that was suspected on an engine have the engine again, as it is back."""
    request.suspicion = request.suspicion.without(engine)


def _lost_while(request: RequestState) -> str:
    return (
        f"its engine was lost {request.losses} times while it computed the prompt of this request"
    )
