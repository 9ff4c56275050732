"""Engines as automata: what an engine does in a state is worked out once, by the production code,
and then known.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from flying_serving.engine.messages import Message, RunStep
from flying_serving.layout.groups import Group, KVSource
from flying_serving.migration.offers import Offer
from tests.with_vllm.engine.schedulers import BLOCK
from tests.with_vllm.protocol import weights
from tests.with_vllm.protocol.alike import freeze, key_of
from tests.with_vllm.protocol.client import ClientMessage
from tests.with_vllm.protocol.engine import Engine
from tests.with_vllm.protocol.offers import Look, View
from tests.with_vllm.protocol.sampling import Draw, Samples
from tests.with_vllm.protocol.settings import Overdue, Took

TICKS = (0, 1, 2)
"""How much time may have passed when an engine goes through its loop: none, all waits are over, all
pauses too.
"""
NOTHING = (None,) * BLOCK
"""What is seen in a block in which nothing is to be seen."""


@dataclass(frozen=True)
class Did:
    """What came of something that an engine did.

    Args:
        after: the number of its state.
        sent: the messages that it sent, by number, and to whom.
        done: the requests that it completed.
        failed: the requests that it ended with an error.
        given: the requests of a group of which it gave out tokens.
        took: what became of the message.
        overdue: what of it was over, if it has read offers.
        wrong: what went wrong, if anything did: an exception of the production code, or a check
            that failed.
    """

    after: int
    sent: tuple[tuple[Group, int], ...] = ()
    done: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    took: Took = Took.NOT
    overdue: Overdue | None = None
    wrong: str | None = None


@dataclass(frozen=True)
class Facts:
    """What is asked of an engine's state from outside.

    Args:
        busy: sizes of the lanes that it leads and that have something to do.
        lent: by size of the group: the group blocks for which it has lent blocks, and how many it
            has offered.
        borrowed: by size of the groups that it leads: the group blocks that it may use.
        waits: whether requests come here with their KV, and whether some is kept for others to
            fetch.
        sources: what offers KV of requests that come here, and to groups of which size.
        offers, rows: what others can see of it (`offers.py`).
        shown: number of these.
        where: by size of the group: which blocks in the place of weights are lent to it.
        lends: whether it may lend weights.
        samples: what it has sampled.
    """

    busy: tuple[int, ...]
    lent: dict[int, tuple[frozenset[int], int]]
    borrowed: dict[int, frozenset[int]]
    waits: Overdue
    sources: tuple[tuple[KVSource, int], ...]
    offers: dict[int, Offer]
    rows: dict[tuple[int, int], Any]
    shown: int
    where: dict[int, tuple[tuple[int, int], ...]]
    lends: bool
    samples: Samples

    @classmethod
    def of(cls, engine: Engine, numbers: dict[Hashable, int]) -> Facts:
        """Look at an engine; `numbers`: of what others saw so far."""
        lanes, migrations = engine.loop.lanes, engine.loop.migrations
        arrivals = migrations.incoming.by_id.values()
        offers, rows = engine.table.shown(engine.memory)
        where = {size: engine.table.where(size) for size in lanes.members}
        books = {size: member.lent for size, member in lanes.members.items()}
        return cls(
            tuple(
                size for size, scheduler in engine.schedulers.items() if scheduler.has_requests()
            ),
            {size: (frozenset(one.table) - {0}, len(one.reserved)) for size, one in books.items()},
            {size: frozenset(leader.borrowed.held) for size, leader in lanes.leaders.items()},
            Overdue(bool(arrivals), bool(migrations.source.retained), bool(engine.weights)),
            tuple((arrival.source, arrival.size) for arrival in arrivals),
            offers,
            rows,
            numbers.setdefault((freeze(offers), freeze(rows), freeze(where)), len(numbers)),
            where,
            engine.weights is not None,
            engine.samples,
        )

    def seen(self, look: Look) -> Any:
        """Return what another engine sees that looks at this one."""
        if isinstance(look.what, int):
            return self.offers.get(look.what)
        if isinstance(look.what, str):
            return self.where.get(look.size, ())
        return tuple(self.rows.get((look.size, block), NOTHING) for block in look.what)


class Engines:
    """All states of engines that were met, and all messages, by number.

    Args:
        exact: whether time passes by itself (`Settings.exact`).
        most_overdue: how many steps of other lanes an engine may make while a lane is due.
    """

    def __init__(self, *, exact: bool, most_overdue: int) -> None:
        self.facts: list[Facts] = []
        self.messages: list[Message] = []
        self._most_overdue = most_overdue
        self._ticks = (0,) if exact else TICKS
        self._states: list[bytes] = []
        self._numbers: dict[Hashable, int] = {}
        self._message_numbers: dict[Hashable, int] = {}
        self._known: dict[Hashable, tuple[Did, ...]] = {}
        self._shown: dict[Hashable, int] = {}
        self.pulled = 0
        """In how many ways a request came with KV."""

    def add(self, engine: Engine) -> Did:
        """Number a state, and check it."""
        engine.loop.lanes.check()
        if engine.weights is not None:
            weights.check(engine)
        worst = max(engine.overdue.values(), default=0)
        assert worst <= self._most_overdue, (
            f"a lane is due, and others have made {worst} steps since"
        )
        sent = tuple((members, self._message(message)) for members, message in engine.channel.sent)
        engine.channel.sent, engine.channel.next = [], None
        self.pulled += engine.loop.migrations.incoming.counts().migrated
        failed, given = engine.failed, engine.given
        done = engine.settle()
        number = self._numbers.setdefault(key_of(engine), len(self._states))
        if number == len(self._states):
            self._states.append(pickle.dumps(engine, protocol=pickle.HIGHEST_PROTOCOL))
            self.facts.append(Facts.of(engine, self._shown))
        return Did(number, sent, done, failed, given)

    def __len__(self) -> int:
        """Return how many states of engines there are."""
        return len(self._states)

    def _message(self, message: Message) -> int:
        key = (type(message), freeze(message))
        number = self._message_numbers.setdefault(key, len(self.messages))
        if number == len(self.messages):
            self.messages.append(message)
        return number

    def go_on(
        self,
        state: int,
        number: int | None,
        views: tuple[View, ...] = ((),),
        overdue: Overdue | None = None,
    ) -> tuple[Did, ...]:
        """Go once through the loop, with a message or none: all that may come of it.

        `views`: what is seen of other engines; if several, it has read offers already, and
        `overdue` is what was over.
        """
        message = None if number is None else self.messages[number]
        overs = [
            Overdue(*over)
            for over in product(*((False, True)[: 1 + here] for here in self.facts[state].waits))
        ]
        dids = []
        for over in overs if overdue is None else [overdue]:
            # requests that migrate are looked after before all else: what else may be over is just
            # before or just after
            ticks = (0,) if any(over) and overdue is None else self._ticks
            deeds = [
                partial(Engine.go_on, message=message, ticks=n, overdue=over, views=views)
                for n in ticks
            ]
            for did in self._do(("go on", state, number, views, over), deeds):
                dids.append(replace(did, overdue=over) if did.took is Took.READ else did)
        return tuple(dict.fromkeys(dids))

    def step(
        self, state: int, number: int, aborting: tuple[str, ...], view: View, draw: Draw
    ) -> Did:
        """Make a step of a group."""
        message = self.messages[number]
        assert isinstance(message, RunStep)
        deed = partial(Engine.step, message=message, aborting=aborting, view=view, draw=draw)
        return self._do(("step", state, number, aborting, view, draw), [deed])[0]

    def hear(self, state: int, client_message: ClientMessage, view: View) -> Did:
        """Handle a client's message."""
        return self._do(
            ("hear", state, client_message, view),
            [lambda engine: engine.hear(client_message, view)],
        )[0]

    def pass_time(self, state: int) -> Did:
        """Let a tick pass."""
        return self._do(("pass time", state), [lambda engine: engine.pass_time()])[0]

    def _do(
        self, key: tuple[Any, ...], deeds: Sequence[Callable[[Engine], Any]]
    ) -> tuple[Did, ...]:
        known = self._known.get(key)
        if known is None:
            # the same may come of several
            known = self._known[key] = tuple(
                dict.fromkeys(self._try(key[1], deed) for deed in deeds)
            )
        return known

    def _try(self, state: int, deed: Callable[[Engine], Any]) -> Did:
        engine: Engine = pickle.loads(self._states[state])
        try:
            took = deed(engine)
            if took is Took.READ:
                return Did(state, took=took)
            did = self.add(engine)
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here is what is looked for
            return Did(state, wrong=f"engine {engine.number}: {type(error).__name__}: {error}")
        return replace(did, took=took) if isinstance(took, Took) else did
