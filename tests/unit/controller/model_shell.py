"""A shell around the controller without engines: it holds each command against what the shell
knows.
"""

from flying_serving.controller.commands import (
    Command,
    Dispatch,
    DispatchPrefix,
    DropPart,
    FetchWeights,
    LendWeights,
    Order,
    PullAhead,
    Recall,
    Reject,
    Weave,
)
from flying_serving.controller.controller import Controller
from flying_serving.controller.requests import RequestSpec
from flying_serving.controller.settings import Settings
from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Group, KVSource, Layout
from tests.unit.controller.model_checks import check_books, check_dispatch, check_requests
from tests.unit.controller.model_settings import ANSWER
from tests.unit.controller.model_streams import ModelStream, Part
from tests.unit.policy.costs import Costs, costs, measured


class ModelShell:
    """Carries out commands and fails if one of them cannot be.

    `dispatched` is of the last event, `refused` and `switches` of all. `holds`: a sequential switch
    waits for requests to end, and nothing may be dispatched. `pauses`: engines pause older lanes,
    as a hard switch was the last.
    """

    def __init__(self, chosen: Settings, lanes: Costs | None = None) -> None:
        self.controller = Controller(chosen)
        self.controller.state.steps.calibrate(
            measured(lanes or costs(tuple(chosen.capacity.kv_tokens)))
        )
        self.layout = self.controller.state.layout
        self.now_s = 0.0
        self.holds = False
        self.pauses = False
        self.open: dict[str, ModelStream] = {}
        self.ordered: Switch | None = None
        self.is_regrouped = False
        self.dispatched: list[tuple[str, Group]] = []
        self.refused: list[str] = []
        self.switches: list[Switch] = []
        self.offers: set[int] = set()
        self.parts: dict[int, Part] = {}
        self.weights = dict.fromkeys(self.controller.state.weight_lending.phases, "whole")
        """Of the widest groups: whole, lending, lent or fetching, as engines are told and
        answer.
        """

    # ---- events

    def arrive(self, request_id: str, spec: RequestSpec) -> None:
        """Raises as the controller; nothing has changed then."""
        commands = self.controller.arrived(request_id, spec, self.now_s)
        self.open[request_id] = ModelStream(spec, self.now_s)
        self.carry_out(commands)

    def token(self, request_id: str, count: int = 1) -> None:
        """An engine gives tokens, as many as it may; it then ends the request, or the group is
        full.
        """
        stream = self.open[request_id]
        most = min(stream.limit, stream.spec.max_output_tokens)
        count = min(count, most - stream.tokens)
        stream.tokens += count
        stream.tokens_here += count
        stream.ahead, stream.begun = 0, True
        self.controller.got_tokens(request_id, count, self.now_s)
        if stream.tokens == stream.spec.max_output_tokens:
            self.finish(request_id)
        elif stream.tokens == stream.limit:
            stream.kv = (
                KVSource(stream.group, stream.offer)
                if stream.group and stream.offer is not None
                else None
            )
            stream.group = None
            commands = self.controller.group_full(request_id, self.now_s)
            if commands is None:
                group = self.group_of(stream.limit + stream.spec.prompt_tokens)
                assert group, "it was not as long as its group holds"
                self.finish(request_id)
            else:
                assert stream.spec.can_migrate
                self.carry_out(commands)

    def begin(self, request_id: str) -> None:
        """A scheduler has a request, or its prefix, in a step."""
        self.open[request_id].begun = True
        self.controller.state.deadlines.drop(request_id)

    def finish(self, *request_ids: str, aborted: bool = False) -> None:
        """Requests end, wherever they are."""
        for request_id in request_ids:
            self.open.pop(request_id, None)
        self.carry_out(self.controller.finished(request_ids, self.now_s, aborted=aborted))

    def end_prefix(self, number: int, *, failed: bool = False) -> None:
        """A prefix ends in its group, which may have failed it."""
        part = self.parts[number]
        if not failed:
            del self.parts[number]
        self.carry_out(self.controller.prefix_ended(part.request_id, self.now_s, failed=failed))
        assert number not in self.parts

    def regroup(self) -> None:
        """The engines whose groups change answer the order."""
        assert self.ordered is not None and not self.is_regrouped
        self.is_regrouped = True
        self.carry_out(self.controller.regrouped(self.now_s))

    def acknowledge(self) -> None:
        """All engines have answered the order, those whose groups change before."""
        assert self.ordered is not None
        commands = [] if self.is_regrouped else self.controller.regrouped(self.now_s)
        self.ordered = None
        self.carry_out(commands + self.controller.acknowledged([ANSWER], self.now_s))

    def answer_weights(self, group: Group, *, complete: bool = True) -> None:
        """The engines of a group have lent their weights, not all of them if not `complete`, or
        have them back.
        """
        lends = self.weights[group] == "lending"
        self.weights[group] = "whole" if not lends else "lent" if complete else "failed"
        if lends:
            self.carry_out(self.controller.weights_lent(group, self.now_s, complete=complete))
        else:
            self.carry_out(self.controller.weights_back(group, self.now_s))

    def fail(self) -> None:
        """Some engine does not."""
        assert self.ordered is not None
        switch, self.ordered = self.ordered, None
        self.controller.failed(switch, "engine 1 did not answer", self.now_s)
        self.check()

    def drop(self) -> None:
        """The switch that waits for requests to end is not made after all."""
        self.holds = False
        self.carry_out(self.controller.drop("cancelled", self.now_s))

    def order(self, layout: Layout, mode: str = "weave") -> None:
        """An operator wants a layout."""
        _, commands = self.controller.begin_switch(layout, mode, None, self.now_s)
        self.carry_out(commands)
        assert not self.parts, "an operator's order undoes every split"

    def tick(self, passed_s: float = 0.1) -> None:
        """Time passes."""
        self.now_s += passed_s
        self.carry_out(self.controller.tick(self.now_s))

    def settle(self, rounds: int, *, until_changed: bool = False) -> None:
        """Everything that can happen does, again and again, until nothing is open, or until no
        switch is under way.
        """
        for _ in range(rounds):
            if not self.controller.changeover.is_under_way and (until_changed or not self.open):
                return
            if self.ordered is not None:
                self.acknowledge()
            for group in self.going():
                self.answer_weights(group)
            for request_id in self.running():
                if request_id in self.open and self.open[request_id].group is not None:
                    self.token(request_id, 10_000)
            self.tick()
        raise AssertionError(f"still open: {self.open}, layout {self.controller.state.layout}")

    # ---- what is where

    def running(self) -> list[str]:
        """Those that some group has."""
        return [request_id for request_id, stream in self.open.items() if stream.group is not None]

    def going(self) -> list[Group]:
        """Groups whose weights go or come."""
        return [group for group, phase in self.weights.items() if phase in ("lending", "fetching")]

    def prefixes(self) -> list[int]:
        """Numbers of the prefixes that groups have."""
        return [number for number, part in self.parts.items() if not part.is_ahead]

    def waiting(self) -> list[str]:
        """Those that none has."""
        return [request_id for request_id, stream in self.open.items() if stream.group is None]

    def streams_of_switches(self) -> set[str]:
        """Every request of which switches keep something."""
        switches = self.controller.state.switches
        kept = set(switches._gaps._token_at) | set(switches._migrating)
        return kept.union(*(one.draining | one.migrating for one in switches._open))

    # ---- commands

    def other(self, command: Command) -> None:
        """Do what only some controllers tell."""
        raise AssertionError(command)

    def carry_out(self, commands: list[Command]) -> None:
        """Do as told, in order, and compare notes."""
        self.dispatched = []
        for command in commands:
            match command:
                case Dispatch():
                    self._dispatch(command)
                case DispatchPrefix():
                    self._dispatch_prefix(command)
                case PullAhead():
                    self._pull_ahead(command)
                case DropPart(request_id, group, number):
                    part = self.parts.pop(number)
                    assert part.request_id == request_id
                    assert part.group == group
                    assert command.keeps == (request_id in self.open and not part.is_ahead)
                case Recall():
                    self._recall(command)
                case Reject():
                    self._refuse(command)
                case Order(switch, _):
                    self._order(switch)
                case Weave(engines):
                    assert self.pauses and self.ordered is None and engines == self.layout.engines
                    self.pauses = False
                case LendWeights(group):
                    self._lend(group)
                case FetchWeights(group):
                    assert self.weights[group] in ("lent", "failed")
                    assert self.weights[group] == "failed" or not self._needs_lent(group)
                    self.weights[group] = "fetching"
                case _:
                    self.other(command)
        self.check()

    def _lend(self, group: Group) -> None:
        assert self.weights[group] == "whole" and not self.controller.changeover.is_under_way
        assert any(stream.group is None for stream in self.open.values()), "nobody waits"
        busy = [
            one.group
            for one in (*self.open.values(), *self.parts.values())
            if one.group not in (None, group)
        ]
        assert not any(set(group).intersection(other or ()) for other in busy)
        self.weights[group] = "lending"

    def _needs_lent(self, group: Group) -> bool:
        room = self.controller.settings.capacity.kv_tokens[len(group)]
        return any(one.needed_tokens > room for one in self.open.values() if one.group == group)

    def tokens_of(self, group: Group, needed: int = 0) -> int:
        """Return the tokens that a group holds for a request that needs `needed` of them.

        Its engines have the weights for it.
        """
        capacity = self.controller.settings.capacity
        if len(group) < max(capacity.kv_tokens):
            assert all(
                phase == "whole" for outer, phase in self.weights.items() if group[0] in outer
            )
        elif self.weights[group] == "lent" and needed > capacity.kv_tokens[len(group)]:
            return capacity.lent_tokens
        return capacity.kv_tokens[len(group)]

    def _dispatch(self, command: Dispatch) -> None:
        stream, group = self.open[command.request_id], command.group
        holds = self.tokens_of(group, stream.needed_tokens)
        check_dispatch(self, command, holds)
        if (
            stream.kv is not None
            and (part := self.parts.get(stream.kv.number)) is not None
            and part.is_ahead
        ):
            assert part.group == group, "another group has pulled its KV"
            del self.parts[stream.kv.number]

        stream.offer = self._offered(command.offer)
        stream.arrived_with_kv = command.migrated_from is not None
        prompt_and_outputs = stream.spec.prompt_tokens + stream.tokens
        stream.ahead = max(1, stream.ahead) if stream.arrived_with_kv else prompt_and_outputs
        stream.group = group
        stream.limit, stream.tokens_here = command.limit_tokens, 0
        self.dispatched.append((command.request_id, group))

    def is_apart(self, command: Dispatch) -> bool:
        """Whether a request may have a group that the layout lacks."""
        return False

    def _dispatch_prefix(self, command: DispatchPrefix) -> None:
        stream, number = self.open[command.request_id], self._offered(command.offer)
        assert number is not None and stream.group is None and stream.tokens == 0
        assert 0 < command.prefix_tokens < stream.spec.prompt_tokens
        part = Part(command.request_id, command.group, command.prefix_tokens, is_ahead=False)
        self._split(stream, number, part)
        stream.kv = KVSource(command.group, number)
        stream.ahead = stream.spec.prompt_tokens - command.prefix_tokens
        stream.arrived_with_kv = True

    def _pull_ahead(self, command: PullAhead) -> None:
        stream, kv = self.open[command.request_id], command.kv
        assert stream.group == kv.group
        assert stream.offer == kv.number
        assert stream.group != command.group
        assert command.up_to_tokens == stream.spec.prompt_tokens + stream.limit - 1, (
            "the last token has no KV"
        )
        part = Part(command.request_id, command.group, command.up_to_tokens, is_ahead=True)
        self._split(stream, kv.number, part)

    def _split(self, stream: ModelStream, number: int, part: Part) -> None:
        spec, chosen = stream.spec, self.controller.settings
        assert spec.can_migrate and spec.degree is None and self.controller.state.migrates
        assert spec.split_at == part.tokens or (
            spec.split_at is None and chosen.policy.splits and not chosen.dry_run
        )
        assert spec.prompt_splits or part.is_ahead
        assert not self.holds and self.ordered is None
        assert part.group in self.layout.groups and part.tokens < self.tokens_of(part.group)
        assert part.request_id not in [one.request_id for one in self.parts.values()]
        self.parts[number] = part

    def group_of(self, tokens: int) -> list[int]:
        """Sizes of the groups that hold just as many tokens."""
        capacity = self.controller.settings.capacity
        every = [*capacity.kv_tokens.items(), (max(capacity.kv_tokens), capacity.lent_tokens)]
        return [size for size, holds in every if holds == tokens]

    def _offered(self, number: int | None) -> int | None:
        """A number under which KV will be offered: no other was."""
        assert number not in self.offers
        if number is not None:
            self.offers.add(number)
        return number

    def _recall(self, command: Recall) -> None:
        stream = self.open[command.request_id]
        assert stream.group == command.group
        assert stream.tokens == 0 or stream.spec.can_migrate
        policy = self.controller.settings.policy
        decides = policy.by_load or policy.by_priority or policy.by_context
        moved = self.controller.state.started.get(command.request_id)
        is_planned_again = moved is not None and moved.plan is not None and moved.plan.is_revised
        migrates_left_behind = (
            decides and self.ordered is None and stream.group not in self.layout.groups
        )
        assert (
            stream.tokens_here == 0
            or migrates_left_behind
            or is_planned_again
            or self.controller.state.switches.kept[-1].mode in ("soft", "migrate")
        )
        assert stream.spec.degree is None
        number = self._offered(command.offer)
        has_kv = stream.tokens_here > 0 or stream.arrived_with_kv
        assert not has_kv or (number is not None) == bool(self.controller.state.migrates)
        stream.group, stream.kv = None, None if number is None else KVSource(command.group, number)

    def _refuse(self, command: Reject) -> None:
        stream = self.open.pop(command.request_id)
        assert not stream.begun, "its client may read a stream already"
        assert stream.group == command.group
        assert stream.spec.deadline_s is not None
        assert command.waited_s == self.now_s - stream.arrived_s >= stream.spec.deadline_s - 1e-9
        self.refused.append(command.request_id)

    def _order(self, switch: Switch) -> None:
        assert self.ordered is None, "two switches at once"
        assert switch.decision is None or not self.controller.settings.dry_run
        if switch.mode == "sequential":
            assert all(stream.group in (None, *switch.new.groups) for stream in self.open.values())
        if switch.mode == "soft":
            assert not self.controller.state.switches._open[-1].draining
        assert all(part.group in switch.new.groups for part in self.parts.values())
        assert all(self.tokens_of(group) for group in switch.new.groups)
        self.ordered, self.layout, self.holds, self.is_regrouped = switch, switch.new, False, False
        self.pauses = switch.mode == "hard"
        self.switches.append(switch)

    def check(self) -> None:
        """The controller knows of the same requests, in the same places."""
        check_requests(self)
        check_books(self)
        controller = self.controller
        assert controller.state.layout == self.layout
        assert self.streams_of_switches() <= set(self.open)
        waits = controller.changeover.is_under_way and self.ordered is None
        assert not (waits and self.pauses), "a switch waits for the end of requests that are paused"
        self.holds = waits and controller.state.switches.kept[-1].mode == "sequential"
