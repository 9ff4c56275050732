"""One engine of production classes, taken apart into what it may do next: hear, go once through its loop, step.

Its loop is the production loop, and so is everything that it calls, but for what is vLLM's: the scheduler is a small
one, the model writes down whose token is in which block, and nothing goes to a client.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

from flying_serving.config import FlyingConfig
from flying_serving.engine.group import Leader, Member
from flying_serving.engine.lane import Lane, Lanes
from flying_serving.engine.loop import EngineLoop, Instruments
from flying_serving.engine.messages import Message, RunStep
from flying_serving.engine.utilities import EngineUtilities
from flying_serving.layout.groups import Group, aligned_group
from flying_serving.memory.kv_view import Run
from flying_serving.migration.messages import MigrateKV, decode_offers
from flying_serving.migration.source import RETAIN_S
from flying_serving.migration.target import PATIENCE_S
from flying_serving.migration.transfer import copy_kv, share_offers
from flying_serving.vllm_adapter.blocks import SchedulerPool
from flying_serving.vllm_adapter.keys import LANE_KEY, MIGRATED_FROM_KEY
from flying_serving.worker.lanes import WorkerLanes
from tests.engine.schedulers import BLOCK, FakeScheduler, Request
from tests.protocol.alike import forget_times, rename_blocks
from tests.protocol.client import Abort, ClientMessage, Job, Retain, after
from tests.protocol.doubles import NOW_S, PAUSE_S, TICK_S, Board, Entered, Inbox, Nothing, now
from tests.protocol.faults import Fault, inject
from tests.protocol.memory import EndlessScheduler, ListPool, Memory

SIZES = (1, 2, 4)


class Took(Enum):
    """What became of the message that an engine had when it went through its loop."""

    NOT = "it did something else first"
    SERVED = "it was served"
    ENTERED = "the engine has entered its step, and waits for the other members"


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


class Overdue(NamedTuple):
    """Which waits of requests that migrate are over.

    Args:
        arrivals: of those that wait for room for their KV.
        retained: of those whose KV waits to be fetched.
    """

    arrivals: bool = False
    retained: bool = False


class Engine:
    """A production loop, and in place of vLLM's engine its host.

    Args:
        number: of this one.
        settings: what all of them are made with.
        fault: what is broken.
        mobile: ids of requests whose KV is fetched, or arrives.
    """

    def __init__(
        self, number: int, settings: Settings, fault: Fault | None = None, mobile: Container[str] = ()
    ) -> None:
        self.number, self.settings = number, settings
        self.channel = Inbox()
        self.memory = Memory(settings.blocks, mobile)
        self.overdue: dict[int, int] = {}
        """By size, for older lanes that are led here, have work and are due: steps of others made here since then."""
        self._rounds = 0
        self._aborting: tuple[str, ...] = ()
        self._offered: tuple[int, ...] | None = None
        self._copied: MigrateKV | None = None
        own = SchedulerPool(self._make_scheduler((number,)))
        lanes = [Lane((number,), BLOCK, None, own)]
        for size in SIZES[1:]:
            group = aligned_group(number, size)
            pool = SchedulerPool(self._make_scheduler(group)) if group[0] == number else None
            leader = None if pool is None else Leader(group, pool, self.channel, settings.lend_blocks)
            lanes.append(Lane(group, BLOCK, None, pool, Member(group, number, own, self.channel), leader))
        instruments: Any = Instruments(Board(self), Nothing(), self)  # type: ignore[arg-type]
        flying = FlyingConfig(weave_steps=1, max_pause_ms=PAUSE_S * 1000)
        self.loop = EngineLoop(number, Lanes(lanes), self.channel, self, flying, instruments, now)
        inject(fault, self.loop.migrations)

    def _make_scheduler(self, group: Group) -> Any:
        blocks, endless = self.settings.blocks, self.settings.endless
        if endless:
            return EndlessScheduler(blocks, pool=ListPool(blocks), busy=group in endless)
        return FakeScheduler(blocks, pool=ListPool(blocks))

    @property
    def schedulers(self) -> dict[int, Any]:
        """The schedulers on this engine, by size."""
        return self.loop.lanes.schedulers

    # ---- the host of the loop

    def serves_on(self) -> bool:
        """One round at a time."""
        self._rounds -= 1
        return self._rounds >= 0

    def take_messages(self, wait: Any) -> bool:
        """Nothing is heard within a round."""
        assert wait is None or wait.timeout_s is None or wait.timeout_s >= 0, f"waits for {wait.timeout_s} s"
        return False

    def has_own_steps(self) -> bool:
        """Whether lane 1 has something to step."""
        return bool(self.schedulers[1].has_requests())

    def step_own(self) -> bool:
        """A step of lane 1."""
        plan = self.schedulers[1].schedule()
        self.memory.write(plan)
        self.schedulers[1].update_from_output(plan, None)
        return bool(plan.total_num_scheduled_tokens)

    def add_own(self, request: Any, wave: int) -> None:
        """To lane 1's scheduler."""
        self.schedulers[1].add_request(request)

    def process_aborts(self) -> None:
        """Those that arrive while a step is made."""
        self.loop.abort(list(self._aborting))

    def emit(self, outputs: Any) -> None:
        """Nothing goes to a client."""

    def call_workers(self, function: Callable[..., Any], *args: Any) -> Any:
        """What the workers do, all of which are one memory."""
        if function is WorkerLanes.execute:
            return self.memory.write(args[1])
        if function is share_offers:
            return self._share_offers(*args)
        assert function is copy_kv
        return self._copy_kv(*args)

    def _share_offers(self, group: Group, sender: int, numbers: list[int] | None, count: int) -> list[int]:
        if self._offered is None:  # all that is asked for is what this engine says
            assert numbers is not None
            self._offered = tuple(numbers)
            raise Entered
        assert numbers is None or tuple(numbers) == self._offered
        assert len(self._offered) == count
        return list(self._offered)

    def _copy_kv(
        self, group: Group, source: tuple[Group, list[Run] | None], target: tuple[Group, list[Run] | None], count: int
    ) -> None:
        """What a source has is what it should have; so all members of a target get that, under its new id."""
        assert self._copied is not None
        assert self._offered is not None
        names = copied(self._copied, self._offered)
        for name, run in zip(names, source[1] or [([], range(0))] * len(names), strict=True):
            self.memory.read(name, run)
        for name, run in zip(names, target[1] or [([], range(0))] * len(names), strict=True):
            self.memory.take(after(name), run)
        assert all(sum(len(tokens) for _, tokens in runs) == count for _, runs in (source, target) if runs is not None)

    # ---- what observes it

    def stepped(self, size: int, *_: Any) -> None:
        """As its trace: look which lanes are due after a step."""
        arbiter = self.loop.arbiter
        ready = {1: self.has_own_steps()} | {s: one.ready(NOW_S) for s, one in self.loop.lanes.leaders.items()}
        paused_s = {other: NOW_S - arbiter._stepped_at_s.get(other, NOW_S) for other in ready}
        due = [s for s in ready if ready[s] and s not in (size, arbiter.present) and paused_s[s] >= PAUSE_S]
        self.overdue = {other: self.overdue.get(other, 0) + 1 for other in due}

    def ordered(self, *_: Any) -> None:
        """As its trace: an order is nothing to look at."""

    def pass_time(self) -> None:
        """Let a tick pass."""
        loop = self.loop
        loop.arbiter._stepped_at_s = {size: at - TICK_S for size, at in loop.arbiter._stepped_at_s.items()}
        loop.arbiter._hold_until_s -= TICK_S
        loop._own_at_s -= TICK_S
        for leader in loop.lanes.leaders.values():
            leader._retry_at -= TICK_S
            leader._ask_at -= TICK_S
        for member in loop.lanes.members.values():
            member._needed_at -= TICK_S

    # ---- what may happen

    def hear(self, client_message: ClientMessage) -> None:
        """Handle what the client sent."""
        utilities = EngineUtilities(self.loop, Nothing(), 0, [], [])  # type: ignore[arg-type]
        match client_message:
            case Job(name, size):
                extra: dict[str, Any] = {LANE_KEY: size}
                if client_message.migrated_from is not None:
                    source = client_message.migrated_from
                    extra[MIGRATED_FROM_KEY] = (source[0], len(source), client_message.old_name)
                sent: Any = SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(extra_args=extra))
                self.loop.requests.note_route(sent)
                self.loop.add(Request(name, client_message.prompt, client_message.tokens), 0)
            case Abort(name):
                self.loop.abort([name])
                self._is_without(name)
            case Retain(name):
                utilities.flying_retain([name])
                self._is_without(name)
            case _:
                group = list(aligned_group(self.number, client_message.size))
                utilities.flying_switch(group, "hard" if client_message.hard else "weave", 1, NOW_S)

    def _is_without(self, name: str) -> None:
        """Nobody wants the request here any more: it must not go on."""
        target = self.loop.migrations.target
        arriving = [one for one in target.arriving.values() if not one.aborted and not one.left]
        here = [arrival.request.request_id for arrival in (*target.waiting, *arriving)]
        here += [running for scheduler in self.schedulers.values() for running in scheduler.requests]
        assert name not in here, f"{name} goes on, though nobody wants it here any more"

    def go_on(self, message: Message | None, ticks: int, overdue: Overdue) -> Took:
        """Go once through the loop, after a number of ticks, with a message or none."""
        for _ in range(ticks):
            self.pass_time()
        migrations = self.loop.migrations
        for arrival in migrations.target.waiting if overdue.arrivals else ():
            arrival.since_s -= PATIENCE_S + TICK_S
        for retained in migrations.source.retained.values() if overdue.retained else ():
            retained.since_s -= RETAIN_S + TICK_S
        self.channel.next = message
        self._rounds = 1
        try:
            self.loop.run()
        except Entered:
            return Took.ENTERED
        return Took.NOT if self.channel.next is message else Took.SERVED

    def step(self, message: RunStep, aborting: tuple[str, ...]) -> None:
        """Make a step of a group that all members have entered; aborts arrive while it is made."""
        self._aborting = aborting
        self.loop.handle(message)
        self._aborting = ()

    def offer(self, message: MigrateKV) -> tuple[int, ...]:
        """Return what this engine, the source's leader, tells all others when they have entered the copy."""
        try:
            self.loop.handle(message)
        except Entered:
            assert self._offered is not None
            return self._offered
        raise AssertionError("nothing was offered")

    def copy(self, message: MigrateKV, offered: tuple[int, ...]) -> None:
        """Make the copy that all have entered."""
        self._offered, self._copied = offered, message
        self.loop.handle(message)
        self._offered = self._copied = None

    def settle(self) -> tuple[str, ...]:
        """Forget what can make no difference any more. Returns the requests that were completed."""
        done = tuple(name for scheduler in self.schedulers.values() for name in scheduler.done)
        for scheduler in self.schedulers.values():
            scheduler.done, scheduler.outputs = [], []
            scheduler.seen &= set(scheduler.requests)
        forget_times(self)
        rename_blocks(self)
        return done


def copied(message: MigrateKV, offered: tuple[int, ...]) -> list[str]:
    """Return the requests of a copy of which some KV is there, by what the source's leader offered."""
    offers = decode_offers(offered, [-(-one.tokens // BLOCK) for one in message.requests])
    pairs = zip(message.requests, offers, strict=True)
    return [one.request_id for one, offer in pairs if min(offer.tokens, one.tokens) > one.start_tokens]
