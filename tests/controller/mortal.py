"""The shell around a controller whose engines may die."""

from __future__ import annotations

from flying_serving.controller.commands import Command, Dispatch, Fail, Recall
from flying_serving.controller.settings import Settings
from flying_serving.controller.surviving import MOST_LOSSES, SurvivingController
from flying_serving.layout.groups import Layout
from tests.controller.shell import TOKENS, Shell
from tests.policy.costs import Costs


class MortalShell(Shell):
    """A shell that loses engines. `failed`: requests that ended with an error, and `strikes` of those that are open."""

    kind = SurvivingController
    controller: SurvivingController

    def __init__(self, chosen: Settings, lanes: Costs | None = None) -> None:
        super().__init__(chosen, lanes)
        self.lost: set[int] = set()
        self.failed: list[str] = []
        self.strikes: dict[str, int] = {}
        self.to_restore: Layout | None = None
        """What is to be made again when all engines are there, where no policy decides."""

    def carry_out(self, commands: list[Command]) -> None:
        """Once engines are told of a layout, what was ordered before is not made again."""
        super().carry_out(commands)
        if self.ordered is not None:
            self.to_restore = None

    def lose(self, engine: int) -> None:
        """An engine dies: its group is no more, nor the switch under way; nobody pulls what its groups offered."""
        chosen = self.controller.settings
        if self.to_restore is None and (chosen.dry_run or not chosen.policy.decides):
            self.to_restore = self.layout
        self.lost.add(engine)
        self.ordered, self.holds, self.is_regrouped = None, False, False
        self.layout = self.layout.without(self.lost)
        for name in self._first_prompts(engine):
            self.strikes[name] = self.strikes.get(name, 0) + 1
        for stream in self.open.values():
            if stream.group is None and stream.kv is not None and engine in stream.kv.group:
                stream.kv = None
        self.carry_out(self.controller.engines_lost([engine], self.now_s))
        assert not any(engine in (one.group or ()) for one in (*self.open.values(), *self.parts.values()))

    def _first_prompts(self, engine: int) -> set[str]:
        """Requests whose prompts, or parts of them, the engine's groups may have computed."""
        found, most = set[str](), self.controller.settings.limits.max_num_batched_tokens
        parts = {f"{part.request_id} (part)": part for part in self.parts.values()}
        for group in self.controller.loads.groups:
            begun = 0
            for booked in self.controller.loads[group].requests if engine in group else ():
                part = parts.get(booked)
                name = booked if part is None else part.request_id
                ahead = self.open[name].ahead if part is None else (not part.is_ahead) * part.tokens
                if ahead > 0 and begun < most:
                    found.add(name)
                begun += ahead
        return found

    def check(self) -> None:
        """As any shell; and engines that are there are in the layout, others are not."""
        super().check()
        assert self.controller.layout.engines == set(range(self.controller.settings.engines)) - self.lost

    def revive(self, engine: int) -> None:
        """It is started again."""
        self.lost.discard(engine)
        self.layout = self.layout.beside(engine)
        self.to_restore = None if self.to_restore is None else self.to_restore.beside(engine)
        self.carry_out(self.controller.engine_back(engine, self.now_s))

    def token(self, request_id: str, count: int = 1) -> None:
        """A token shows that the request does no harm."""
        self.strikes.pop(request_id, None)
        super().token(request_id, count)

    def other(self, command: Command) -> None:
        """A request that lost its group fails only if it cannot go on, or is suspected."""
        assert isinstance(command, Fail)
        stream = self.open.pop(command.request_id)
        assert stream.group is not None and not self.lost.isdisjoint(stream.group)
        suspected = self.strikes.get(command.request_id, 0) >= MOST_LOSSES
        assert suspected or (stream.tokens > 0 and not stream.spec.can_migrate)
        assert "engine was lost" in command.why
        self.failed.append(command.request_id)

    def is_apart(self, command: Dispatch) -> bool:
        """One that is suspected has a narrow group for itself."""
        return bool(self.strikes.get(command.request_id))

    def _dispatch(self, command: Dispatch) -> None:
        name, group = command.request_id, command.group
        assert self.lost.isdisjoint(group)
        if self.is_apart(command):
            suspects = [
                other for other, stream in self.open.items() if stream.group == group and self.strikes.get(other)
            ]
            narrow = min(size for size, tokens in TOKENS.items() if tokens >= self._needed(self.open[name]))
            assert not suspects and len(group) == (self.open[name].spec.degree or narrow)
        super()._dispatch(command)

    def _recall(self, command: Recall) -> None:
        stream = self.open[command.request_id]
        if self.lost.isdisjoint(command.group):
            super()._recall(command)
            return
        assert (stream.group, command.offer) == (command.group, None)
        assert self.strikes.get(command.request_id, 0) < MOST_LOSSES
        stream.group = stream.kv = None
