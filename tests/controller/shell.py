"""A shell around the controller without engines: it holds each command against what the shell knows."""

from dataclasses import dataclass

from flying_serving.controller.commands import Command, Dispatch, Order, Recall, Reject
from flying_serving.controller.controller import Controller
from flying_serving.controller.requests import RequestSpec
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
) -> Settings:
    """Return settings of a small server: an engine holds 100 tokens, a group as many for each of its engines."""
    sizes = [size for size in TOKENS if size <= engines]
    pinned = POLICIES[policy].pinned_size
    if pinned is not None:
        sizes, capped = [pinned(sizes)], False
    return Settings(
        engines,
        Capacity({size: TOKENS[size] for size in sizes}, 1),
        POLICIES[policy],
        Limits(max_num_seqs, max_num_batched_tokens, capped),
        Objective(10.0),
        most_waiting=most_waiting,
        dry_run=dry_run,
    )


@dataclass
class Stream:
    """A request as the shell knows it: where it is, and what it has got, in all and from its present group.

    `ahead`: tokens without KV that its group computes first. `kv_group`: while it waits, the group that may have its
    KV, and has it if it got tokens there or `arrived_with_kv`.
    """

    spec: RequestSpec
    arrived_s: float
    group: Group | None = None
    had_group: bool = False
    tokens: int = 0
    tokens_here: int = 0
    limit: int = 0
    ahead: int = 0
    kv_group: Group | None = None
    arrived_with_kv: bool = False


class Shell:
    """Carries out commands and fails if one of them cannot be.

    `dispatched` is of the last event, `refused` and `switches` of all. `holds`: a sequential switch waits for
    requests to end, and nothing may be dispatched.
    """

    def __init__(self, chosen: Settings, lanes: Costs | None = None) -> None:
        self.controller = Controller(chosen)
        self.controller.steps.calibrate(measured(lanes or costs(tuple(chosen.capacity.tokens))))
        self.layout = self.controller.layout
        self.now_s = 0.0
        self.holds = False
        self.open: dict[str, Stream] = {}
        self.ordered: Switch | None = None
        self.dispatched: list[tuple[str, Group]] = []
        self.refused: list[str] = []
        self.switches: list[Switch] = []

    # ---- events

    def arrive(self, request_id: str, spec: RequestSpec) -> None:
        """Raises as the controller; nothing has changed then."""
        commands = self.controller.arrived(request_id, spec, self.now_s)
        self.open[request_id] = Stream(spec, self.now_s)
        self.carry_out(commands)

    def token(self, request_id: str, count: int = 1) -> None:
        """An engine gives tokens, as many as it may; it then ends the request, or the group is full."""
        stream = self.open[request_id]
        most = min(stream.limit, stream.spec.max_output_tokens)
        count = min(count, most - stream.tokens)
        stream.tokens += count
        stream.tokens_here += count
        stream.ahead = 0
        self.controller.tokens(request_id, count, self.now_s)
        if stream.tokens == stream.spec.max_output_tokens:
            self.finish(request_id)
        elif stream.tokens == stream.limit:
            stream.group = stream.kv_group = None
            commands = self.controller.group_full(request_id, self.now_s)
            if commands is None:
                self.finish(request_id)
            else:
                assert stream.spec.can_migrate
                self.carry_out(commands)

    def finish(self, *request_ids: str, aborted: bool = False) -> None:
        """Requests end, wherever they are."""
        for request_id in request_ids:
            self.open.pop(request_id, None)
        self.carry_out(self.controller.finished(request_ids, self.now_s, aborted=aborted))

    def acknowledge(self) -> None:
        """All engines answer the order."""
        assert self.ordered is not None
        self.ordered = None
        self.carry_out(self.controller.acknowledged([ANSWER], self.now_s))

    def fail(self) -> None:
        """Some engine does not."""
        assert self.ordered is not None
        self.ordered = None
        self.controller.failed("engine 1 did not answer", self.now_s)
        self.check()

    def drop(self) -> None:
        """The switch that waits for requests to end is not made after all."""
        self.holds = False
        self.carry_out(self.controller.drop("cancelled", self.now_s))

    def order(self, layout: Layout, mode: str = "weave") -> None:
        """An operator wants a layout."""
        _, commands = self.controller.order(layout, mode, None, self.now_s)
        self.carry_out(commands)

    def tick(self, passed_s: float = 0.1) -> None:
        """Time passes."""
        self.now_s += passed_s
        self.carry_out(self.controller.tick(self.now_s))

    def settle(self, rounds: int, *, until_changed: bool = False) -> None:
        """Everything that can happen does, again and again, until nothing is open, or until no switch is under way."""
        for _ in range(rounds):
            if not self.controller.changing and (until_changed or not self.open):
                return
            if self.ordered is not None:
                self.acknowledge()
            for request_id in self.running():
                if request_id in self.open and self.open[request_id].group is not None:
                    self.token(request_id, 10_000)
            self.tick()
        raise AssertionError(f"still open: {self.open}, layout {self.controller.layout}")

    # ---- what is where

    def running(self) -> list[str]:
        """Those that some group has."""
        return [request_id for request_id, stream in self.open.items() if stream.group is not None]

    def waiting(self) -> list[str]:
        """Those that none has."""
        return [request_id for request_id, stream in self.open.items() if stream.group is None]

    def streams_of_switches(self) -> set[str]:
        """Every request of which switches keep something."""
        switches = self.controller.switches
        kept = set(switches._gaps._token_at) | set(switches._migrating)
        return kept.union(*(switch.draining | switch.migrating for switch in switches.kept))

    # ---- commands

    def carry_out(self, commands: list[Command]) -> None:
        """Do as told, in order, and compare notes."""
        self.dispatched = []
        for command in commands:
            match command:
                case Dispatch():
                    self._dispatch(command)
                case Recall():
                    self._recall(command)
                case Reject():
                    self._refuse(command)
                case Order(switch, _):
                    self._order(switch)
        self.check()

    def _dispatch(self, command: Dispatch) -> None:
        stream, group = self.open[command.request_id], command.group
        spec, holds = stream.spec, self.controller.settings.capacity.tokens[len(group)]
        assert stream.group is None, "dispatched twice"
        assert group == aligned_group(group[0], len(group))
        assert group in self.layout.groups or spec.degree == len(group)
        assert spec.degree in (None, len(group))
        assert spec.tokens <= holds
        assert command.output_tokens == stream.tokens
        assert command.limit_tokens == holds - spec.prompt_tokens > stream.tokens, "no room for a further token"
        assert not self.holds, "dispatched while a sequential switch waits"
        may_migrate = stream.kv_group is not None and self._can_migrate(stream.kv_group, group)
        must_migrate = may_migrate and (stream.tokens_here > 0 or stream.arrived_with_kv)
        assert command.migrated_from in (None, stream.kv_group)
        assert may_migrate or command.migrated_from is None
        assert not must_migrate or command.migrated_from is not None
        stream.arrived_with_kv = command.migrated_from is not None
        stream.ahead = max(1, stream.ahead) if stream.arrived_with_kv else spec.prompt_tokens + stream.tokens
        stream.group, stream.had_group = group, True
        stream.limit, stream.tokens_here = command.limit_tokens, 0
        self.dispatched.append((command.request_id, group))

    def _can_migrate(self, old: Group, new: Group) -> bool:
        """Whether it was measured how long it takes in the smallest group that covers both."""
        sizes = self.controller.settings.capacity.tokens
        enclosing = [size for size in sizes if {*old, *new} <= set(aligned_group(old[0], size))]
        return bool(enclosing) and min(enclosing) in self.controller.migrates

    def _recall(self, command: Recall) -> None:
        stream = self.open[command.request_id]
        assert stream.group == command.group
        assert stream.tokens == 0 or stream.spec.can_migrate
        policy = self.controller.settings.policy
        decides = policy.by_load or policy.by_priority or policy.by_context
        migrates_left_behind = decides and self.ordered is None and stream.group not in self.layout.groups
        assert (
            stream.tokens_here == 0
            or migrates_left_behind
            or self.controller.switches.kept[-1].mode in ("soft", "migrate")
        )
        assert stream.spec.degree is None
        stream.group, stream.kv_group = None, command.group

    def _refuse(self, command: Reject) -> None:
        stream = self.open.pop(command.request_id)
        assert not stream.had_group, "its client reads a stream already"
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
        self.ordered, self.layout, self.holds = switch, switch.new, False
        self.switches.append(switch)

    def check(self) -> None:
        """The controller knows of the same requests, in the same places."""
        controller = self.controller
        assert sorted(self.waiting()) == sorted(state.request_id for state in controller.pool)
        assert controller.running == len(self.running())
        for request_id, stream in self.open.items():
            assert controller.group_of(request_id) == stream.group
            if stream.group is not None:
                state = controller.loads[stream.group].requests[request_id]
                assert (state.output_tokens, state.prefill_tokens) == (stream.tokens, stream.ahead)
        in_groups = {stream.group for stream in self.open.values() if stream.group is not None}
        assert set(controller.loads.groups) == in_groups
        assert controller.layout == self.layout
        assert self.streams_of_switches() <= set(self.open)
        waits = controller.changing and self.ordered is None
        self.holds = waits and controller.switches.kept[-1].mode == "sequential"
