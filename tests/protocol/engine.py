"""One engine of production classes, taken apart into what it may do next: hear, go once through its loop, step.

Its loop is the production loop, and so is everything that it calls, but for what is vLLM's: the scheduler is a small
one, the model writes down whose token is in which block, and nothing goes to a client.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from flying_serving.engine.arbiter import LaneArbiter
from flying_serving.engine.core import FlyingEngineCore
from flying_serving.engine.group import Leader, Member
from flying_serving.engine.moves import PATIENCE_S, RETAINED_S, Moves
from flying_serving.engine.tickets import MigrateKV, RunStep, Ticket
from flying_serving.layout.groups import Group, aligned_group
from flying_serving.vllm_adapter.blocks import SchedulerPool
from tests.engine.schedulers import BLOCK, FakeScheduler, Request
from tests.protocol.alike import forget_times, rename_blocks
from tests.protocol.doubles import NOW_S, PAUSE_S, TICK_S, Board, Nothing, Outbox
from tests.protocol.memory import EndlessScheduler, ListPool, Memory, Run
from tests.protocol.messages import Abort, Job, Message, Retain, after

SIZES = (1, 2, 4)


class Took(Enum):
    """What became of the ticket that an engine had when it went through its loop."""

    NOT = "it did something else first"
    SERVED = "it was served"
    CAME = "the engine has come to its step, and waits for the other members"


@dataclass(frozen=True)
class Settings:
    """What engines are made with.

    Args:
        blocks: physical blocks of each, one of them null.
        lend_blocks: how many a leader asks for, at the least.
        endless: lanes that have work without end and need no blocks, by group; the others have none at all.
        exact: whether it is kept how long ago things were, with a tick for each step, and more ticks at any time. If
            not, any wait and any pause may be over at any time, which allows all that can really happen, and more.
    """

    blocks: int = 3
    lend_blocks: int = 1
    endless: tuple[Group, ...] = ()
    exact: bool = False


class Late(NamedTuple):
    """Which waits of requests that move are over.

    Args:
        arrivals: of those that wait for room for their KV.
        retained: of those whose KV waits to be fetched.
    """

    arrivals: bool = False
    retained: bool = False


class _Came(Exception):
    """The next thing is a step or an exchange of a group, which needs the others."""


class Engine(FlyingEngineCore):
    """The production engine without vLLM behind it.

    Args:
        number: of this one.
        settings: what all of them are made with.
        moves: what it moves requests with.
        mobile: ids of requests whose KV is fetched, or comes.
    """

    def __init__(
        self, number: int, settings: Settings, moves: type[Moves] = Moves, mobile: Container[str] = ()
    ) -> None:
        self.engine = number
        self.settings = settings
        self.arbiter = LaneArbiter(1, PAUSE_S)
        channel: Any = Outbox()
        self.channel: Any = channel
        self.scheduler = self._make_scheduler((number,))
        self.own = SchedulerPool(self.scheduler)
        groups = {size: aligned_group(number, size) for size in SIZES[1:]}
        self.members = {size: Member(group, number, self.own, channel) for size, group in groups.items()}
        self.leaders = {
            size: Leader(group, self._make_scheduler(group), channel, settings.lend_blocks)
            for size, group in groups.items()
            if group[0] == number
        }
        self._lane_of = {}
        self._moved_from = {}
        led = self._led()
        tokens = dict.fromkeys(SIZES, BLOCK)
        self.moves = moves(number, led, tokens, self.members, channel, self._rpc, self._admit, self._lacks)
        self.memory = Memory(settings.blocks, mobile)
        self.model_executor = self
        self.board: Any = Board()
        self.report: Any = Nothing()
        self.trace = None
        self.batch_queue = None
        self._last_step_s = (0.0, 0.0)
        self._alone_at = 0.0
        self._rounds = 0
        self._together = False
        self._aborting: tuple[str, ...] = ()
        self._told: tuple[int, ...] | None = None
        self._exchanged: MigrateKV | None = None
        self.overdue: dict[int, int] = {}
        """By size, for older lanes that are led here, have work and are due: steps of others made here since then."""

    def _make_scheduler(self, group: Group) -> Any:
        blocks, endless = self.settings.blocks, self.settings.endless
        if endless:
            return EndlessScheduler(blocks, pool=ListPool(blocks), busy=group in endless)
        return FakeScheduler(blocks, pool=ListPool(blocks))

    # ---- what is vLLM's

    def _handle_shutdown(self) -> bool:
        self._rounds -= 1
        return self._rounds >= 0

    def _take_messages(self, wait: Any) -> None:
        assert wait is None or wait.timeout_s is None or wait.timeout_s >= 0, f"waits for {wait.timeout_s} s"

    def _process_engine_step(self) -> bool:
        plan = self.scheduler.schedule()
        self.memory.write(plan)
        self.scheduler.update_from_output(plan, None)
        return bool(plan.total_num_scheduled_tokens)

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[None]:
        """What the executor does."""
        assert method == "execute_lane"
        self.memory.write(args[1])
        return [None]

    def _rpc(self, method: str, *args: Any) -> Any:
        """What the executor does when KV moves."""
        return self._tell(*args) if method == "tell_moved" else self._move_kv(*args)

    def _tell(self, cover: Group, sender: int, numbers: list[int] | None, count: int) -> list[int]:
        if self._told is None:  # all that is asked for is what this engine says
            assert numbers is not None
            self._told = tuple(numbers)
            raise _Came
        assert numbers is None or tuple(numbers) == self._told
        assert len(self._told) == count
        return list(self._told)

    def _move_kv(
        self, cover: Group, source: Group, target: Group, mine: list[Run] | None, theirs: list[Run] | None, count: int
    ) -> None:
        """What a source has is what it should have; so all members of a target get that, under its new id."""
        assert self._exchanged is not None
        assert self._told is not None
        names = moving(self._exchanged, self._told)
        for name, run in zip(names, mine or [([], range(0))] * len(names), strict=True):
            self.memory.read(name, run)
        for name, run in zip(names, theirs or [([], range(0))] * len(names), strict=True):
            self.memory.take(after(name), run)
        assert all(sum(len(tokens) for _, tokens in runs) == count for runs in (mine, theirs) if runs is not None)

    def _admit(self, request: Any, size: int, wave: int = 0) -> None:
        self.lanes()[size].add_request(request)

    def _process_aborts_queue(self) -> None:
        self.abort_requests(self._aborting)

    def _emit(self, outputs: Any) -> None:
        pass

    # ---- what may happen

    def lanes(self) -> dict[int, Any]:
        """Return the schedulers on this engine, by size."""
        return {1: self.scheduler} | {size: leader.scheduler for size, leader in self.leaders.items()}

    def hear(self, message: Message) -> None:
        """Handle what the client sent."""
        match message:
            case Job(name, size):
                if size > 1:
                    self._lane_of[name] = size
                if message.moved_from is not None:
                    self._moved_from[name] = (message.moved_from[0], len(message.moved_from), message.old_name)
                request: Any = Request(name, message.prompt, message.tokens)
                self.add_request(request)
            case Abort(name):
                self.abort_requests([name])
                self._is_without(name)
            case Retain(name):
                self.flying_retain([name])
                self._is_without(name)
            case _:
                group = list(aligned_group(self.engine, message.size))
                self.flying_switch(group, "hard" if message.hard else "weave", 1, NOW_S)

    def _is_without(self, name: str) -> None:
        """Nobody wants the request here any more: it must not go on."""
        coming = [one for one in self.moves._coming.values() if not one.aborted and not one.left]
        here = [arrival.request.request_id for arrival in (*self.moves._waiting, *coming)]
        here += [running for scheduler in self.lanes().values() for running in scheduler.requests]
        assert name not in here, f"{name} goes on, though nobody wants it here any more"

    def go_on(self, ticket: Ticket | None, ticks: int, late: Late) -> Took:
        """Go once through the loop, after so many ticks, with a ticket or none."""
        for _ in range(ticks):
            self.pass_time()
        for arrival in self.moves._waiting if late.arrivals else ():
            arrival.since_s -= PATIENCE_S + TICK_S
        for retained in self.moves._retained.values() if late.retained else ():
            retained.since_s -= RETAINED_S + TICK_S
        self.channel.next = ticket
        self._rounds, self._together = 1, False
        try:
            self.run_busy_loop()
        except SystemExit:
            return Took.NOT if self.channel.next is ticket else Took.SERVED
        except _Came:
            return Took.CAME
        raise AssertionError("the loop has no end")

    def step(self, ticket: RunStep, aborting: tuple[str, ...]) -> None:
        """Make a step of a group to which all members have come; aborts arrive while it is made."""
        self._aborting, self._together = aborting, True
        self._serve(ticket)
        self._aborting = ()

    def offer(self, ticket: MigrateKV) -> tuple[int, ...]:
        """Return what this engine, the source's leader, tells all others when they have come to the exchange."""
        self._together = True
        try:
            self._serve(ticket)
        except _Came:
            assert self._told is not None
            return self._told
        raise AssertionError("nothing was told")

    def exchange(self, ticket: MigrateKV, told: tuple[int, ...]) -> None:
        """Make the exchange to which all have come."""
        self._together, self._told, self._exchanged = True, told, ticket
        self._serve(ticket)
        self._told = self._exchanged = None

    def _serve(self, ticket: Any) -> None:
        if isinstance(ticket, RunStep | MigrateKV) and not self._together:
            raise _Came
        super()._serve(ticket)

    def _ran(self, size: int, *args: Any, **options: Any) -> None:
        if self.settings.exact:
            self.pass_time()
        super()._ran(size, *args, **options)
        ready = {1: bool(self.scheduler.has_requests())} | {s: one.ready(NOW_S) for s, one in self.leaders.items()}
        paused_s = {other: NOW_S - self.arbiter._stepped_at.get(other, NOW_S) for other in ready}
        due = [s for s in ready if ready[s] and s not in (size, self.arbiter.present) and paused_s[s] >= PAUSE_S]
        self.overdue = {other: self.overdue.get(other, 0) + 1 for other in due}

    def pass_time(self) -> None:
        """Let a tick pass."""
        arbiter = self.arbiter
        arbiter._stepped_at = {size: at - TICK_S for size, at in arbiter._stepped_at.items()}
        arbiter._expect_until -= TICK_S
        self._alone_at -= TICK_S
        for leader in self.leaders.values():
            leader._retry_at -= TICK_S
            leader._ask_at -= TICK_S
        for member in self.members.values():
            member._needed_at -= TICK_S

    def settle(self) -> tuple[str, ...]:
        """Forget what can make no difference any more. Returns the requests that were completed."""
        done = tuple(name for scheduler in self.lanes().values() for name in scheduler.done)
        for scheduler in self.lanes().values():
            scheduler.done, scheduler.outputs = [], []
            scheduler.seen &= set(scheduler.requests)
        forget_times(self)
        rename_blocks(self)
        return done


def moving(ticket: MigrateKV, told: Sequence[int]) -> list[str]:
    """Return the requests of an exchange of which some KV is there to be moved, by what the source's leader told."""
    names = []
    for move in ticket.moves:
        if min(told[0], move.tokens) > move.start:
            names.append(move.request_id)
        told = told[1 - -move.tokens // BLOCK :]
    return names
