"""One engine with all that is on its way to it, and with what it has yet to send: what happens there, by number.

A ticket has its place in an engine's inbox as soon as its number is taken, arrives some time later, and is served in
its place: what `comm/order.py` and `engine/tickets.py` do. A client's messages arrive in order, some time later.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from flying_serving.engine.tickets import BlocksReserved, LendBlocks, MigrateKV, RunStep
from flying_serving.layout.groups import Group
from tests.protocol.automaton import Did, Engines
from tests.protocol.engine import Engine, Took
from tests.protocol.messages import Abort, Message
from tests.protocol.plants import Plant

GONE = -1
"""In place of the state of an engine that has stopped, and of a ticket that has gone with its sender."""

Label = tuple[Any, ...]
Entry = tuple[int, int]
"""In an inbox: (sender, ticket)."""
Sent = tuple[Group, int]


class Seat(NamedTuple):
    """Where an engine sits.

    Args:
        engine: number of its state.
        inside: the ticket to whose step it has come, while the others have not all come.
        inbox: in the order of their places.
        seen: whether the first of these is known to have arrived.
        sending: tickets that the engine sends, one after the other.
        heard: what is on its way from the client.
        prompt: whether the engine has just come out of a step, and goes through its loop before a ticket arrives.
    """

    engine: int
    inside: int | None = None
    inbox: tuple[Entry, ...] = ()
    seen: bool = False
    sending: tuple[Sent, ...] = ()
    heard: tuple[Message, ...] = ()
    prompt: bool = False


class Event(NamedTuple):
    """Something that may happen at a seat.

    Args:
        label: what it is.
        after: number of the seat after that.
        sent: the ticket that is sent with it.
        done: jobs that it completes.
        heard: the message that is heard.
        wrong: what went wrong.
    """

    label: Label
    after: int
    sent: Sent | None = None
    done: tuple[str, ...] = ()
    heard: Message | None = None
    wrong: str | None = None

    @property
    def silent(self) -> bool:
        """Whether nobody else can notice it."""
        return self.sent is None and not self.done and self.wrong is None


class Seats:
    """All seats that were met, by number, for one exploration.

    Args:
        engines: their engines.
        exact: whether time passes by itself (`Settings.exact`).
        prompt: whether an engine that comes out of a step has gone through its loop before a ticket arrives that was
            not there yet.
        plant: what is broken.
    """

    def __init__(self, engines: Engines, *, exact: bool, prompt: bool, plant: Plant | None) -> None:
        self.engines = engines
        self.exact = exact
        self.prompt = prompt
        self.plant = plant
        self.seats: list[Seat] = []
        self._numbers: dict[Seat, int] = {}
        self.events = cache(self._events)
        self.settled = cache(self._settled)
        self.push = cache(self._push)
        self.lose = cache(self._lose)
        self.step = cache(self._step)
        self.gone = self.number(Seat(GONE))

    def number(self, seat: Seat) -> int:
        """Return the number of a seat."""
        number = self._numbers.setdefault(seat, len(self.seats))
        if number == len(self.seats):
            self.seats.append(seat)
        return number

    def take(self, engine: Engine) -> int:
        """Return the seat of an engine to which nothing is on its way."""
        return self.number(Seat(self.engines.add(engine).after))

    def say(self, number: int, message: Message) -> int:
        """Return a seat with one more message from the client on its way."""
        seat = self.seats[number]
        return number if number == self.gone else self.number(seat._replace(heard=(*seat.heard, message)))

    # ---- what may happen

    def _events(self, number: int, who: int) -> tuple[Event, ...]:
        """Return all that may happen next at the seat of engine `who`."""
        seat = self.seats[number]
        if seat.engine == GONE or seat.inside is not None:
            return ()
        if seat.sending:
            return (Event(("sends on", who), self.number(seat._replace(sending=seat.sending[1:])), seat.sending[0]),)
        return (*self._hear(seat, who), *self._go_on(seat, who))

    def _hear(self, seat: Seat, who: int) -> tuple[Event, ...]:
        if not seat.heard:
            return ()
        message = seat.heard[0]
        did = self.engines.hear(seat.engine, message)
        event = self._event(("hears", who, message), seat._replace(heard=seat.heard[1:]), did)
        return (event._replace(heard=message),)

    def _go_on(self, seat: Seat, who: int) -> list[Event]:
        """The engine goes once through its loop: with a ticket that has arrived, or without."""
        events = []
        if seat.prompt:
            seat = seat._replace(prompt=False)
            return [self._event(("goes on", who), seat, did) for did in self.engines.go_on(seat.engine, None)]
        for place in self._arrivals(seat.inbox):
            sender, ticket = seat.inbox[place]
            rest = seat._replace(inbox=seat.inbox[:place] + seat.inbox[place + 1 :], seen=False)
            after = {
                Took.NOT: seat._replace(seen=True),
                Took.SERVED: rest,
                Took.CAME: rest._replace(inside=ticket),
            }
            for did in self.engines.go_on(seat.engine, ticket):
                events.append(self._event(("has", who, sender, ticket, did.took), after[did.took], did))
        if not self._is_here(seat, who) or self.plant is Plant.BY_ARRIVAL:
            for did in self.engines.go_on(seat.engine, None):
                if did.after != seat.engine or did.sent or did.done or did.wrong:
                    events.append(self._event(("goes on", who), seat, did))
        if self.exact:
            did = self.engines.pass_time(seat.engine)
            if did.after != seat.engine:
                events.append(self._event(("lets time pass", who), seat, did))
        return events

    def _arrivals(self, inbox: tuple[Entry, ...]) -> list[int]:
        """Return places in an inbox whose ticket may be served, if it has arrived."""
        if self.plant is Plant.BY_ARRIVAL:
            senders = [sender for sender, _ in inbox]
            return [place for place, sender in enumerate(senders) if sender not in senders[:place]]
        return [0] if inbox and inbox[0][1] != GONE else []

    def _is_here(self, seat: Seat, who: int) -> bool:
        """Return whether the next ticket has arrived for certain: it was seen, or is the engine's own."""
        return seat.seen or (bool(seat.inbox) and seat.inbox[0][0] == who and seat.inbox[0][1] != GONE)

    def _event(self, label: Label, seat: Seat, did: Did) -> Event:
        if did.wrong is not None:
            return Event(label, self.gone, wrong=did.wrong)
        sent = did.sent
        if self.plant is Plant.NOT_AT_ONCE:
            sent = tuple(((member,), ticket) for members, ticket in sent for member in members)
        after = seat._replace(engine=did.after, sending=sent[1:])
        return Event(label, self.number(after), sent[0] if sent else None, did.done)

    def _settled(self, number: int, who: int, sender_may_stop: bool) -> bool:
        """Return whether no other engine can change what may happen next here, and can notice it.

        There is a ticket, which nobody can take away any more; the engine may do something else before it serves it,
        but whatever it does is silent.
        """
        seat = self.seats[number]
        if seat.engine == GONE or seat.inside is not None or seat.sending or not seat.inbox or seat.inbox[0][1] == GONE:
            return False
        if sender_may_stop and not self._is_here(seat, who):
            return False
        return all(event.silent for event in self.events(number, who))

    def _step(self, number: int, heard: tuple[Any, ...], label: Label) -> Event:
        """Make the step or the exchange to which an engine has come.

        `heard`: aborts of which it hears while it makes a step; what the leader of the source tells in an exchange.
        """
        seat = self.seats[number]
        assert seat.inside is not None
        after = seat._replace(inside=None, prompt=self.prompt and not seat.inbox)
        make = self.engines.exchange if self.source(seat.inside) else self.engines.step
        return self._event(label, after, make(seat.engine, seat.inside, heard))

    def source(self, ticket: int) -> Group:
        """Return the group from which KV moves with a ticket; empty if none does."""
        found = self.engines.tickets[ticket]
        return found.source if isinstance(found, MigrateKV) else ()

    def offer(self, number: int) -> tuple[int, ...]:
        """Return what an engine tells all others in the exchange to which it has come."""
        seat = self.seats[number]
        assert seat.inside is not None
        return self.engines.offer(seat.engine, seat.inside)

    def aborts(self, number: int) -> tuple[str, ...]:
        """Return the jobs whose aborts are on their way."""
        return tuple(message.name for message in self.seats[number].heard if isinstance(message, Abort))

    # ---- tickets

    def group(self, ticket: int) -> Group:
        """Return the group that a ticket is about."""
        return self.engines.tickets[ticket].group

    def _push(self, number: int, who: int, sender: int, ticket: int) -> int:
        """Return the seat of engine `who` with one more ticket on its way."""
        if number == self.gone:
            return number
        seat = self.seats[number]
        inbox = seat.inbox + ((sender, ticket),) * self._copies(sender, who, ticket)
        return self.number(seat._replace(inbox=self._sorted(inbox, ticket, int(seat.seen))))

    def _sorted(self, inbox: tuple[Entry, ...], ticket: int, first: int) -> tuple[Entry, ...]:
        """Grants that follow each other answer one question: which of them comes first makes no difference."""
        if not isinstance(self.engines.tickets[ticket], BlocksReserved):
            return inbox
        place = len(inbox)
        while place > first and self._answers_the_same(inbox[place - 1][1], ticket):
            place -= 1
        return inbox[:place] + tuple(sorted(inbox[place:]))

    def _answers_the_same(self, one: int, other: int) -> bool:
        return (
            one != GONE
            and isinstance(self.engines.tickets[one], BlocksReserved)
            and self.group(one) == self.group(other)
        )

    def _copies(self, sender: int, who: int, number: int) -> int:
        ticket = self.engines.tickets[number]
        if self.plant is Plant.GRANT_DROPPED and isinstance(ticket, BlocksReserved) and sender == 1:
            return 0
        if self.plant is Plant.COMMIT_DROPPED and isinstance(ticket, LendBlocks) and who == 1:
            return 0
        if self.plant is Plant.STEP_TWICE and isinstance(ticket, RunStep) and who == 1 and len(ticket.group) == 2:
            return 2
        return 1

    def _lose(self, number: int, sender: int) -> tuple[int, ...]:
        """Return what a seat may be after an engine has stopped: any number of its last tickets do not arrive."""
        seat = self.seats[number]
        inbox = seat.inbox
        after = [number]
        for place in range(len(inbox) - 1, int(seat.seen) - 1, -1):
            if inbox[place][0] == sender:
                inbox = (*inbox[:place], (sender, GONE), *inbox[place + 1 :])
                after.append(self.number(seat._replace(inbox=inbox)))
        return tuple(after)
