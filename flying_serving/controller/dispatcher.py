"""Where requests run: they go from the task pool to groups, and back or on to other groups when the layout changes."""

from collections.abc import Collection, Mapping

from flying_serving.controller.commands import Command, Dispatch, Recall
from flying_serving.controller.evaluation import Evaluation
from flying_serving.controller.migrations import to_migrate
from flying_serving.controller.placing import Placing, Round
from flying_serving.controller.requests import RequestState
from flying_serving.layout.groups import Group, Layout
from flying_serving.predict.work import LaneFigures


class Dispatcher:
    """Books where each request is, and says so in commands.

    Args:
        server: the pool, loads and layout that it works on.
        placing: chooses groups.
    """

    def __init__(self, server: Evaluation, placing: Placing) -> None:
        self._server = server
        self._placing = placing

    def dispatch(self, now_s: float) -> list[Command]:
        """Offer groups of the layout to the requests that wait, in the pool's order."""
        server = self._server
        if not len(server.pool):
            return []
        commands: list[Command] = []
        lanes = server.lanes()
        places = Round(self._placing, server.layout, server.loads, lanes)

        def place(state: RequestState) -> bool:
            group = places.place(state, self._expected_tokens(state))
            if group is None:
                return False
            commands.append(self._start(state, group, lanes))
            return True

        server.pool.take(place, now_s)
        return commands

    def outside(self, layout: Layout) -> set[str]:
        """Requests that run in groups which `layout` lacks."""
        return {state.request_id for state in self._server.started.values() if state.group not in layout.groups}

    def recall(self, old: Collection[str], now_s: float, *, streams: bool) -> list[Command]:
        """Take requests of older groups back into the pool, those with tokens only if `streams`: see `to_migrate`."""
        server = self._server
        commands: list[Command] = []
        running = [state for state in server.started.values() if state.request_id in old]
        for state, kv_group in to_migrate(running, server.layout, server.settings, streams=streams):
            commands.append(self._suspend(state, now_s, kv_group))
            server.pool.add(state)
        return commands

    def widen(self, draining: Collection[str], now_s: float) -> list[Command]:
        """After a soft switch: what idle engines have begun meanwhile migrates to the groups that they are in now."""
        server = self._server
        commands: list[Command] = []
        lanes = server.lanes()
        for state in list(server.started.values()):
            assert state.group is not None
            group = server.layout.group_of(state.group[0])
            begun = len(state.group) == 1 and state.spec.can_migrate and state.request_id not in draining
            if begun and group != state.group and len(group) in state.sizes:
                commands += [self._suspend(state, now_s, state.group), self._start(state, group, lanes)]
        return commands

    def ended_by_group(self, state: RequestState, now_s: float) -> None:
        """Its group, which is full, has ended it: it waits for another, without KV."""
        self._suspend(state, now_s, None)
        self._server.pool.add(state)

    def _start(self, state: RequestState, group: Group, lanes: Mapping[int, LaneFigures]) -> Dispatch:
        server = self._server
        migrates = self._placing.migration(state, group, lanes) is not None
        source = state.kv_group if migrates else None
        state.kv_group = group if migrates else None
        server.loads.add(state, group, self._expected_tokens(state), kept=migrates)
        server.started[state.request_id] = state
        limit = server.settings.capacity.tokens[len(group)] - state.spec.prompt_tokens
        return Dispatch(state.request_id, group, state.output_tokens, limit, source)

    def _suspend(self, state: RequestState, now_s: float, kv_group: Group | None) -> Recall:
        server, group = self._server, state.group
        assert group is not None
        del server.started[state.request_id]
        state.kv_group = kv_group
        state.sizes = state.fitting(server.settings.capacity.tokens)
        server.loads.remove(state)
        server.switches.migrated(state.request_id, now_s)
        return Recall(state.request_id, group)

    def _expected_tokens(self, state: RequestState) -> float:
        """Tokens at its end: its prompt, and as many outputs as requests have had, if it has not had more."""
        outputs = max(self._server.demand.output_tokens, state.output_tokens + 1.0)
        return state.spec.prompt_tokens + min(outputs, state.spec.max_output_tokens)
