"""A shell around the controller without engines: it holds each command against what the shell
knows.
"""

from dataclasses import dataclass

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
from flying_serving.controller.requests import KVOffer, RequestSpec
from flying_serving.controller.settings import Capacity, Limits, Settings
from flying_serving.controller.switches import Switch
from flying_serving.layout.groups import Group, Layout, aligned_group
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.work import Objective
from flying_serving.wire import SwitchAnswer
from tests.policy.costs import Costs, costs, measured

ANSWER = SwitchAnswer(1.0, 1.0, 0.1)
TOKENS = {1: 100, 2: 200, 4: 400}


def settings(
    policy: str = "auto",
    engines: int = 4,
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    capped: bool = True,
    most_waiting: int = 1000,
    dry_run: bool = False,
    lends: bool = False,
    spare: bool = False,
) -> Settings:
    """Return settings of a small server: an engine holds 100 tokens, a group as many for each of
    its engines.

    With `lends` the widest group holds 75 more for each while it lends its weights. With `spare` a
    fixed layout has engines alone too, while one is lost.
    """
    sizes = [size for size in TOKENS if size <= engines]
    pinned, spares = POLICIES[policy].pinned_size, frozenset[int]()
    if pinned is not None:
        fixed, capped = pinned(sizes), POLICIES[policy].splits
        spares = frozenset({1} - {fixed} if spare else ())
        sizes = [*spares, fixed]
    return Settings(
        engines,
        Capacity(
            {size: TOKENS[size] for size in sizes}, 1, {}, 175 * max(sizes) if lends else 0, spares
        ),
        POLICIES[policy],
        Limits(max_num_seqs, max_num_batched_tokens, capped),
        Objective(10.0),
        most_waiting=most_waiting,
        dry_run=dry_run,
    )


@dataclass(frozen=True)
class Part:
    """What a group has of a split request beside the request itself: a prefix, or with `is_ahead`
    what it pulls.
    """

    request_id: str
    group: Group
    tokens: int
    is_ahead: bool


@dataclass
class ModelStream:
    """A request as the shell knows it: where it is, and what it has got, in all and from its
    present group.

    `ahead`: tokens without KV that its group computes first. `kv`: while it waits, the offer of its
    KV. `offer`: the number under which its group will offer that at its end there.
    """

    spec: RequestSpec
    arrived_s: float
    group: Group | None = None
    begun: bool = False
    tokens: int = 0
    tokens_here: int = 0
    limit: int = 0
    ahead: int = 0
    kv: KVOffer | None = None
    offer: int | None = None
    arrived_with_kv: bool = False


class ModelShell:
    """Carries out commands and fails if one of them cannot be.

    `dispatched` is of the last event, `refused` and `switches` of all. `holds`: a sequential switch
    waits for requests to end, and nothing may be dispatched. `pauses`: engines pause older lanes,
    as a hard switch was the last.
    """

    def __init__(self, chosen: Settings, lanes: Costs | None = None) -> None:
        self.controller = Controller(chosen)
        self.controller.state.steps.calibrate(
            measured(lanes or costs(tuple(chosen.capacity.tokens)))
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
        self.weights = dict.fromkeys(self.controller.state.lending.stages, "whole")
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
        self.controller.tokens(request_id, count, self.now_s)
        if stream.tokens == stream.spec.max_output_tokens:
            self.finish(request_id)
        elif stream.tokens == stream.limit:
            stream.kv = (
                KVOffer(stream.group, stream.offer)
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
        _, commands = self.controller.order(layout, mode, None, self.now_s)
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
            if not self.controller.changing and (until_changed or not self.open):
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
        return [group for group, stage in self.weights.items() if stage in ("lending", "fetching")]

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
        return kept.union(*(switch.draining | switch.migrating for switch in switches.kept))

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
                    assert (part.request_id, part.group) == (request_id, group)
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
        assert self.weights[group] == "whole" and not self.controller.changing
        assert any(stream.group is None for stream in self.open.values()), "nobody waits"
        busy = [
            one.group
            for one in (*self.open.values(), *self.parts.values())
            if one.group not in (None, group)
        ]
        assert not any(set(group).intersection(other or ()) for other in busy)
        self.weights[group] = "lending"

    def _needs_lent(self, group: Group) -> bool:
        room = self.controller.settings.capacity.tokens[len(group)]
        return any(self._needed(one) > room for one in self.open.values() if one.group == group)

    def _needed(self, stream: ModelStream) -> int:
        """Tokens that a request needs room for."""
        return max(stream.spec.needed_tokens, stream.spec.prompt_tokens + stream.tokens + 1)

    def _holds(self, group: Group, needed: int = 0) -> int:
        """What a request may have in a group that needs so many tokens; its engines have the
        weights for it.
        """
        capacity = self.controller.settings.capacity
        if len(group) < max(capacity.tokens):
            assert all(
                stage == "whole" for outer, stage in self.weights.items() if group[0] in outer
            )
        elif self.weights[group] == "lent" and needed > capacity.tokens[len(group)]:
            return capacity.lent_tokens
        return capacity.tokens[len(group)]

    def _dispatch(self, command: Dispatch) -> None:
        stream, group = self.open[command.request_id], command.group
        spec = stream.spec
        holds = self._holds(group, self._needed(stream))
        assert stream.group is None, "dispatched twice"
        assert group == aligned_group(group[0], len(group))
        goes_on_there = command.migrated_from is not None and command.migrated_from.group == group
        assert (
            group in self.layout.groups
            or spec.degree == len(group)
            or goes_on_there
            or self.is_apart(command)
        )
        assert spec.degree in (None, len(group))
        assert goes_on_there or not self._keeps_narrow_waiting(command.request_id, group)
        assert spec.needed_tokens <= holds
        assert command.output_tokens == stream.tokens
        most = holds - spec.prompt_tokens
        assert stream.tokens < command.limit_tokens <= most, "no room for a further token"
        assert command.publishes or command.limit_tokens == most
        assert not self.holds, "dispatched while a sequential switch waits"
        assert command.migrated_from == stream.kv
        chosen = self.controller.settings
        widest = max(chosen.capacity.tokens)
        is_narrower = len(group) < widest or holds < chosen.capacity.lent_tokens
        ends_here = spec.max_output_tokens > command.limit_tokens and is_narrower
        goes_on = spec.can_migrate and spec.degree is None and not chosen.loses_groups
        offers = ends_here and goes_on and bool(self.controller.state.migrates)
        assert (command.offer is not None) == (offers or command.publishes)
        if (
            stream.kv is not None
            and (part := self.parts.get(stream.kv.number)) is not None
            and part.is_ahead
        ):
            assert part.group == group, "another group has pulled its KV"
            del self.parts[stream.kv.number]
        stream.offer = self._offered(command.offer)
        stream.arrived_with_kv = command.migrated_from is not None
        stream.ahead = (
            max(1, stream.ahead) if stream.arrived_with_kv else spec.prompt_tokens + stream.tokens
        )
        stream.group = group
        stream.limit, stream.tokens_here = command.limit_tokens, 0
        self.dispatched.append((command.request_id, group))

    def is_apart(self, command: Dispatch) -> bool:
        """Whether a request may have a group that the layout lacks."""
        return False

    def _keeps_narrow_waiting(self, request_id: str, group: Group) -> bool:
        """Whether engines of a narrower group have to become idle for a request that waits and goes
        before this one.
        """
        capacity = self.controller.settings.capacity
        widest = [
            one
            for one in self.layout.groups
            if len(one) == max(capacity.tokens) and group[0] in one
        ]
        if group in widest or not widest or not capacity.lent_tokens:
            return False
        names, priority = list(self.open), self.open[request_id].spec.priority
        return any(
            one.group is None
            and one.spec.priority <= priority
            and self._needed(one) > capacity.tokens[len(widest[0])]
            for one in (self.open[name] for name in names[: names.index(request_id)])
        )

    def _dispatch_prefix(self, command: DispatchPrefix) -> None:
        stream, number = self.open[command.request_id], self._offered(command.offer)
        assert number is not None and stream.group is None and stream.tokens == 0
        assert 0 < command.tokens < stream.spec.prompt_tokens
        self._split(
            stream, number, Part(command.request_id, command.group, command.tokens, is_ahead=False)
        )
        stream.kv, stream.ahead = (
            KVOffer(command.group, number),
            stream.spec.prompt_tokens - command.tokens,
        )
        stream.arrived_with_kv = True

    def _pull_ahead(self, command: PullAhead) -> None:
        stream, kv = self.open[command.request_id], command.kv
        assert (stream.group, stream.offer) == (kv.group, kv.number)
        assert stream.group != command.group
        assert command.tokens == stream.spec.prompt_tokens + stream.limit - 1, (
            "the last token has no KV"
        )
        self._split(
            stream,
            kv.number,
            Part(command.request_id, command.group, command.tokens, is_ahead=True),
        )

    def _split(self, stream: ModelStream, number: int, part: Part) -> None:
        spec, chosen = stream.spec, self.controller.settings
        assert spec.can_migrate and spec.degree is None and self.controller.state.migrates
        assert spec.split_at == part.tokens or (
            spec.split_at is None and chosen.policy.splits and not chosen.dry_run
        )
        assert spec.prompt_splits or part.is_ahead
        assert not self.holds and self.ordered is None
        assert part.group in self.layout.groups and part.tokens < self._holds(part.group)
        assert part.request_id not in [one.request_id for one in self.parts.values()]
        self.parts[number] = part

    def group_of(self, tokens: int) -> list[int]:
        """Sizes of the groups that hold just as many tokens."""
        capacity = self.controller.settings.capacity
        every = [*capacity.tokens.items(), (max(capacity.tokens), capacity.lent_tokens)]
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
        migrates_left_behind = (
            decides and self.ordered is None and stream.group not in self.layout.groups
        )
        assert (
            stream.tokens_here == 0
            or migrates_left_behind
            or self.controller.state.switches.kept[-1].mode in ("soft", "migrate")
        )
        assert stream.spec.degree is None
        number = self._offered(command.offer)
        has_kv = stream.tokens_here > 0 or stream.arrived_with_kv
        assert not has_kv or (number is not None) == bool(self.controller.state.migrates)
        stream.group, stream.kv = None, None if number is None else KVOffer(command.group, number)

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
            assert not switch.draining
        assert all(part.group in switch.new.groups for part in self.parts.values())
        assert all(self._holds(group) for group in switch.new.groups)
        self.ordered, self.layout, self.holds, self.is_regrouped = switch, switch.new, False, False
        self.pauses = switch.mode == "hard"
        self.switches.append(switch)

    def check(self) -> None:
        """The controller knows of the same requests, in the same places."""
        controller = self.controller
        assert sorted(self.waiting()) == sorted(state.request_id for state in controller.state.pool)
        assert controller.state.running == len(self.running())
        for request_id, stream in self.open.items():
            assert controller.state.group_of(request_id) == stream.group
            if stream.group is not None:
                state = controller.state.loads[stream.group].requests[request_id]
                assert (state.output_tokens, state.prefill_tokens) == (stream.tokens, stream.ahead)
        self._check_books()
        assert controller.state.layout == self.layout
        assert self.streams_of_switches() <= set(self.open)
        waits = controller.changing and self.ordered is None
        assert not (waits and self.pauses), "a switch waits for the end of requests that are paused"
        self.holds = waits and controller.state.switches.kept[-1].mode == "sequential"

    def _check_books(self) -> None:
        """Each request is booked where the shell has it, and so is the part of one that is
        split.
        """
        state = self.controller.state
        state.check_integrity()
        booked = {
            (request_id, group)
            for group in state.loads.groups
            for request_id in state.loads[group].requests
        }
        expected = {
            (name, stream.group) for name, stream in self.open.items() if stream.group is not None
        }
        expected |= {(f"{part.request_id} (part)", part.group) for part in self.parts.values()}
        assert booked == expected
        assert len(state.splits) == len(self.parts)
        assert all(part.request_id in self.open for part in self.parts.values())
