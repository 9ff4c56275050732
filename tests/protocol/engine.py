"""One engine of production classes, taken apart into what it may do next: hear, go once through its loop, step.

Its loop is the production loop, and so is everything that it calls, but for what is vLLM's: the scheduler is a small
one, the model writes down whose token is in which block, and nothing goes to a client.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

from flying_serving.engine.core import FlyingEngineCore
from flying_serving.engine.group import Leader, Member
from flying_serving.engine.tickets import StepTicket, Ticket
from flying_serving.engine.turns import Turns
from flying_serving.layout.groups import Group, aligned_group
from flying_serving.vllm_hooks.blocks import SchedulerPool
from tests.engine.schedulers import EndlessScheduler, FakeScheduler, ListPool, Memory
from tests.protocol.doubles import NOW_S, PAUSE_S, TICK_S, Board, Nothing, Outbox
from tests.protocol.messages import Abort, Job, Message

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


class _Came(Exception):
    """The next thing is a step of a group, which needs the others."""


class Engine(FlyingEngineCore):
    """The production engine without vLLM behind it."""

    def __init__(self, number: int, settings: Settings) -> None:
        self.engine = number
        self.settings = settings
        self.turns = Turns(1, PAUSE_S)
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
        self.memory = Memory(settings.blocks)
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
        if isinstance(message, Job):
            self.lanes()[message.size].add(message.name, message.prompt, message.tokens)
        elif isinstance(message, Abort):
            self.abort_requests([message.name])
        else:
            group = list(aligned_group(self.engine, message.size))
            self.flying_switch(group, "hard" if message.hard else "weave", 1, NOW_S)

    def go_on(self, ticket: Ticket | None, ticks: int) -> Took:
        """Go once through the loop, after so many ticks, with a ticket or none."""
        for _ in range(ticks):
            self.pass_time()
        self.channel.next = ticket
        self._rounds, self._together = 1, False
        try:
            self.run_busy_loop()
        except SystemExit:
            return Took.NOT if self.channel.next is ticket else Took.SERVED
        except _Came:
            return Took.CAME
        raise AssertionError("the loop has no end")

    def step(self, ticket: StepTicket, aborting: tuple[str, ...]) -> None:
        """Make a step of a group to which all members have come; aborts arrive while it is made."""
        self._aborting, self._together = aborting, True
        self._serve(ticket)
        self._aborting = ()

    def _step_together(self, size: int, ticket: StepTicket) -> None:
        if not self._together:
            raise _Came
        super()._step_together(size, ticket)

    def _ran(self, size: int, *args: Any, **options: Any) -> None:
        if self.settings.exact:
            self.pass_time()
        super()._ran(size, *args, **options)
        ready = {1: bool(self.scheduler.has_requests())} | {s: one.ready(NOW_S) for s, one in self.leaders.items()}
        paused_s = {other: NOW_S - self.turns._stepped_at.get(other, NOW_S) for other in ready}
        due = [s for s in ready if ready[s] and s not in (size, self.turns.present) and paused_s[s] >= PAUSE_S]
        self.overdue = {other: self.overdue.get(other, 0) + 1 for other in due}

    def pass_time(self) -> None:
        """Let a tick pass."""
        turns = self.turns
        turns._stepped_at = {size: at - TICK_S for size, at in turns._stepped_at.items()}
        turns._expect_until -= TICK_S
        self._alone_at -= TICK_S
        for leader in self.leaders.values():
            leader._retry_at -= TICK_S
            leader._ask_at -= TICK_S
        for member in self.members.values():
            member._needed_at -= TICK_S

    # ---- states that behave alike are one

    def settle(self) -> tuple[str, ...]:
        """Forget what can make no difference any more. Returns the requests that were completed."""
        done = tuple(name for scheduler in self.lanes().values() for name in scheduler.done)
        for scheduler in self.lanes().values():
            scheduler.done, scheduler.outputs = [], []
            scheduler.seen &= set(scheduler.requests)
        self._forget_times()
        self._rename_blocks()
        return done

    def _forget_times(self) -> None:
        turns = self.turns
        turns._present_steps = min(turns._present_steps, turns.weave_steps)
        turns._left_s = max(turns._left_s, 0.0)
        turns._expect_until = max(turns._expect_until, NOW_S)
        self._alone_at = self._alone_at if self._alone_at > NOW_S else 0.0
        # only lanes that are led here are asked for; of those that are late it matters only which came first
        led = [size for size, lane in self.lanes().items() if lane.has_requests() or not self.settings.endless]
        turns._took_s = {size: took_s for size, took_s in turns._took_s.items() if size in led}
        ages = {size: NOW_S - at for size, at in turns._stepped_at.items() if size in led}
        if self.settings.exact:
            late = sorted({age for age in ages.values() if age >= PAUSE_S})
            ranks = {age: PAUSE_S + rank for rank, age in enumerate(late)}
        else:
            ranks = {age: rank / 1024 for rank, age in enumerate(sorted(set(ages.values())))}
            self.overdue = {}
        turns._stepped_at = {size: NOW_S - ranks.get(age, age) for size, age in ages.items()}
        for leader in self.leaders.values():
            leader._retry_at = max(leader._retry_at, NOW_S)
            leader._ask_at = max(leader._ask_at, NOW_S)
        for member in self.members.values():
            member._needed_at = max(member._needed_at, NOW_S - TICK_S)
        self._last_step_s = (0.0, 0.0)

    def _rename_blocks(self) -> None:
        """Number physical blocks in the order in which they are found: engines speak of group blocks alone."""
        lent = [member.lent for member in self.members.values()]
        requests = [self.scheduler.requests[name] for name in sorted(self.scheduler.requests)]
        found = [books.table[v] for books in lent for v in sorted(books.table)]
        found += [block for books in lent for block in books.offered]
        found += [block for request in requests for block in request.blocks]
        found += self.scheduler.pool.free
        new = {0: 0} | {block: number for number, block in enumerate((b for b in found if b), 1)}
        for books in lent:
            books.table = {v: new[books.table[v]] for v in sorted(books.table)}
            books.offered = [new[block] for block in books.offered]
        for request in requests:
            request.blocks = [new[block] for block in request.blocks]
        self.scheduler.pool.free = [new[block] for block in self.scheduler.pool.free]
        memory = self.memory
        memory.tables = {name: [new[block] for block in blocks] for name, blocks in memory.tables.items()}
        kept = [(place, token) for place, token in memory.content.items() if token[0] in memory.tables]
        memory.content = {(new[block], slot): token for (block, slot), token in kept}

    def key(self) -> Any:
        """Return all that matters of the state, as one hashable value."""
        return (self.engine, *(freeze(getattr(self, name)) for name in _LOOKED_AT))


_LOOKED_AT = ("_alone_at", "turns", "members", "leaders", "scheduler", "memory", "overdue")
_SEEN_ELSEWHERE = frozenset({"pool", "_scheduler", "_pool", "_own", "_channel", "kv_cache_manager"})


def freeze(thing: Any) -> Any:
    """Return a thing and all that it holds as one hashable value; equal things have equal values."""
    if thing is None or isinstance(thing, str | int | float):
        return thing
    if isinstance(thing, dict):
        return tuple(sorted((freeze(key), freeze(value)) for key, value in thing.items()))
    if isinstance(thing, set | frozenset):
        return tuple(sorted(map(freeze, thing)))
    if isinstance(thing, list | tuple | deque):
        return tuple(map(freeze, thing))
    if hasattr(thing, "tobytes"):
        return thing.tobytes()
    return tuple((name, freeze(value)) for name, value in sorted(vars(thing).items()) if name not in _SEEN_ELSEWHERE)
