"""The shell around a controller whose engines may die."""

from __future__ import annotations

from flying_serving.controller.commands import Command, Dispatch, Fail, Recall
from flying_serving.controller.fault_recovery import MOST_WAIT_S
from flying_serving.controller.settings import Settings
from flying_serving.layout.groups import Layout
from tests.unit.controller.model_settings import TOKENS
from tests.unit.controller.model_shell import ModelShell
from tests.unit.policy.costs import Costs


class MortalShell(ModelShell):
    """A shell that loses engines. `failed`: requests that ended with an error.

    Of those that are open, `strikes`: how often their groups were lost with their prompts;
    `company`: how many suspects a group may have with one of them, 0 if it may be tried no more.
    `rested`: both, of those to which their present group has given a token.
    """

    def __init__(self, chosen: Settings, lanes: Costs | None = None) -> None:
        super().__init__(chosen, lanes)
        self.lost: set[int] = set()
        self.failed: list[str] = []
        self.strikes: dict[str, int] = {}
        self.company: dict[str, int] = {}
        self.rested: dict[str, tuple[int, int]] = {}
        self.to_restore: Layout | None = None
        """What is to be made again when all engines are there, where no policy decides."""

    def carry_out(self, commands: list[Command]) -> None:
        """Once engines are told of a layout, what was ordered before is not made again."""
        super().carry_out(commands)
        if self.ordered is not None:
            self.to_restore = None

    def lose(self, engine: int, *, killed: bool = False) -> None:
        """An engine dies: its group is no more, nor the switch under way; nobody pulls what its
        groups offered.
        """
        chosen = self.controller.settings
        if self.to_restore is None and (chosen.dry_run or not chosen.policy.decides):
            self.to_restore = self.layout
        self.lost.add(engine)
        self.ordered, self.holds, self.is_regrouped = None, False, False
        self.layout = self.layout.without(self.lost)
        self._suspect(engine, killed=killed)
        for stream in self.open.values():
            if stream.group is None and stream.kv is not None and engine in stream.kv.group:
                stream.kv = None
        self.carry_out(self.controller.engines_lost([engine], self.now_s, killed=killed))
        assert not any(
            engine in (one.group or ()) for one in (*self.open.values(), *self.parts.values())
        )

    def _suspect(self, engine: int, *, killed: bool) -> None:
        """Half as many suspects as were in its group may be with each next time."""
        groups = self._first_prompts(engine)
        blamed = [
            {name for name in names if not killed or name in self.strikes} for names in groups
        ]
        for name in set[str]().union(*groups):
            beside = max((len(names) for names in blamed if name in names), default=0)
            if name in self.company:
                self.company[name] = min(self.company[name], beside) // 2
            elif beside:
                self.company[name] = max(1, beside // 2)
            self.strikes[name] = self.strikes.get(name, 0) + 1

    def _first_prompts(self, engine: int) -> list[set[str]]:
        """By group of the engine, the requests whose prompts, or parts of them, it may have
        computed.
        """
        found, most = list[set[str]](), self.controller.settings.limits.max_num_batched_tokens
        parts = {f"{part.request_id} (part)": part for part in self.parts.values()}
        for group in self.controller.state.loads.groups:
            begun = 0
            found.append(set())
            for booked in self.controller.state.loads[group].requests if engine in group else ():
                part = parts.get(booked)
                name = booked if part is None else part.request_id
                ahead = self.open[name].ahead if part is None else (not part.is_ahead) * part.tokens
                if ahead > 0 and begun < most:
                    found[-1].add(name)
                begun += ahead
        return found

    def check(self) -> None:
        """As any shell; and engines that are there are in the layout, others are not."""
        super().check()
        assert (
            self.controller.state.layout.engines
            == set(range(self.controller.settings.engines)) - self.lost
        )

    def revive(self, engine: int) -> None:
        """It is started again."""
        self.lost.discard(engine)
        self.layout = self.layout.beside(engine)
        self.to_restore = None if self.to_restore is None else self.to_restore.beside(engine)
        self.carry_out(self.controller.engine_back(engine, self.now_s))

    def token(self, request_id: str, count: int = 1) -> None:
        """A token shows that the request does no harm in its group."""
        strikes, company = self.strikes.pop(request_id, 0), self.company.pop(request_id, None)
        if company is not None:
            self.rested[request_id] = strikes, company
        super().token(request_id, count)

    def _wake(self, request_id: str) -> None:
        """A request leaves its group: in another one it is the suspect that it was."""
        if request_id in self.rested:
            self.strikes[request_id], self.company[request_id] = self.rested.pop(request_id)

    def other(self, command: Command) -> None:
        """A request that lost its group fails only if it cannot go on, or is suspected."""
        assert isinstance(command, Fail)
        stream = self.open.pop(command.request_id)
        waits_for_others = self.strikes.get(command.request_id, 0) > 1 and self.now_s > MOST_WAIT_S
        assert (stream.group is None and waits_for_others) or not self.lost.isdisjoint(
            stream.group or ()
        )
        is_certain = self.company.get(command.request_id) == 0
        assert is_certain or waits_for_others or (stream.tokens > 0 and not stream.spec.can_migrate)
        assert "engine was lost" in command.why
        self.failed.append(command.request_id)

    def is_apart(self, command: Dispatch) -> bool:
        """One that is suspected has a narrow group for itself."""
        return command.request_id in self.company

    def _dispatch(self, command: Dispatch) -> None:
        name, group = command.request_id, command.group
        self._wake(name)  # from a group that it has filled
        assert self.lost.isdisjoint(group)
        if self.is_apart(command):
            there = [
                self.company[one]
                for one in self.company
                if one in self.open and self.open[one].group == group
            ]
            assert len(there) < min([self.company[name], *there])
            others = self.controller.settings.engines - len(self.lost) - len(group)
            assert self.strikes[name] == 1 or not self.lost or others > 0
            narrow = min(
                size for size, tokens in TOKENS.items() if tokens >= self.open[name].needed_tokens
            )
            degree, forms_groups = (
                self.open[name].spec.degree,
                self.controller.settings.forms_groups,
            )
            assert len(group) == (degree or narrow) or (forms_groups and len(group) > narrow)
        super()._dispatch(command)

    def _recall(self, command: Recall) -> None:
        stream = self.open[command.request_id]
        if command.offer is not None:
            assert command.request_id not in self.rested, "it stays in its group"
        self._wake(command.request_id)
        if self.lost.isdisjoint(command.group):
            super()._recall(command)
            return
        assert stream.group == command.group
        assert command.offer is None
        assert self.company.get(command.request_id) != 0
        stream.group = stream.kv = None
