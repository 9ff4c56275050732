"""One engine with all that is on its way to it, and with what it has yet to send: what happens there, by number.

A message has its place in an engine's inbox as soon as its number is taken, arrives some time later, and is served in
its place: what `comm/order.py` and `engine/messages.py` do. A client's messages arrive in order, some time later.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from flying_serving.engine.messages import BlocksReserved, LendBlocks, RunStep
from flying_serving.layout.groups import Group
from flying_serving.migration.messages import MigrateKV
from tests.protocol.automaton import Did, Engines
from tests.protocol.client import Abort, ClientMessage, Order
from tests.protocol.engine import Engine, Took
from tests.protocol.faults import Fault

GONE = -1
"""In place of the state of an engine that has stopped, and of a message that has gone with its sender."""

Label = tuple[Any, ...]
Entry = tuple[int, int]
"""In an inbox: (sender, message)."""
Sent = tuple[Group, int]


class Endpoint(NamedTuple):
    """An engine, and all that is on its way from it and to it.

    Args:
        engine: number of its state.
        inside: the message to whose step it has come, while the others have not all come.
        inbox: in the order of their places.
        seen: whether the first of these is known to have arrived.
        sending: messages that the engine sends, one after the other.
        heard: what is on its way from the client.
        prompt: whether the engine has just come out of a step, and goes through its loop before a message arrives.
    """

    engine: int
    inside: int | None = None
    inbox: tuple[Entry, ...] = ()
    seen: bool = False
    sending: tuple[Sent, ...] = ()
    heard: tuple[ClientMessage, ...] = ()
    prompt: bool = False


class Event(NamedTuple):
    """Something that may happen at an endpoint.

    Args:
        label: what it is.
        after: number of the endpoint after that.
        sent: the message that is sent with it.
        done: jobs that it completes.
        heard: the client_message that is heard.
        wrong: what went wrong.
    """

    label: Label
    after: int
    sent: Sent | None = None
    done: tuple[str, ...] = ()
    heard: ClientMessage | None = None
    wrong: str | None = None

    @property
    def silent(self) -> bool:
        """Whether nobody else can notice it."""
        return self.sent is None and not self.done and self.wrong is None

    @property
    def local(self) -> bool:
        """Whether nothing changes but the endpoint: nobody else and nothing that the client knows."""
        return self.silent and not isinstance(self.heard, Order)


class Endpoints:
    """All endpoints that were met, by number, for one exploration.

    Args:
        engines: their engines.
        exact: whether time passes by itself (`Settings.exact`).
        prompt: whether an engine that comes out of a step has gone through its loop before a message arrives that was
            not there yet.
        mortal: whether an engine may stop, and messages that it has sent go with it.
        fault: what is broken.
    """

    def __init__(self, engines: Engines, *, exact: bool, prompt: bool, mortal: bool, fault: Fault | None) -> None:
        self.engines = engines
        self.exact = exact
        self.prompt = prompt
        self.mortal = mortal
        self.fault = fault
        self.endpoints: list[Endpoint] = []
        self._numbers: dict[Endpoint, int] = {}
        self.inside: list[int | None] = []
        """Of each endpoint, by number."""
        self.events = cache(self._events)
        self.kinds = cache(self._kinds)
        self.settled = cache(self._settled)
        self.push = cache(self._push)
        self.lose = cache(self._lose)
        self.step = cache(self._step)
        self.gone = self.number(Endpoint(GONE))

    def number(self, endpoint: Endpoint) -> int:
        """Return the number of an endpoint."""
        number = self._numbers.setdefault(endpoint, len(self.endpoints))
        if number == len(self.endpoints):
            self.endpoints.append(endpoint)
            self.inside.append(endpoint.inside)
        return number

    def take(self, engine: Engine) -> int:
        """Return the endpoint of an engine to which nothing is on its way."""
        return self.number(Endpoint(self.engines.add(engine).after))

    def say(self, number: int, client_message: ClientMessage) -> int:
        """Return an endpoint with one more message from the client on its way."""
        endpoint = self.endpoints[number]
        return (
            number if number == self.gone else self.number(endpoint._replace(heard=(*endpoint.heard, client_message)))
        )

    # ---- what may happen

    def _events(self, number: int, who: int) -> tuple[Event, ...]:
        """Return all that may happen next at the endpoint of engine `who`."""
        endpoint = self.endpoints[number]
        if endpoint.engine == GONE or endpoint.inside is not None:
            return ()
        if endpoint.sending:
            return (
                Event(
                    ("sends on", who), self.number(endpoint._replace(sending=endpoint.sending[1:])), endpoint.sending[0]
                ),
            )
        return (*self._hear(endpoint, who), *self._go_on(endpoint, who))

    def _kinds(self, number: int, who: int) -> tuple[tuple[tuple[Label, int], ...], tuple[Event, ...]]:
        """Return labels and ends of the events that are local, and all other events."""
        events = self.events(number, who)
        local = tuple((event.label, event.after) for event in events if event.local)
        return local, tuple(event for event in events if not event.local)

    def _hear(self, endpoint: Endpoint, who: int) -> tuple[Event, ...]:
        if not endpoint.heard:
            return ()
        client_message = endpoint.heard[0]
        did = self.engines.hear(endpoint.engine, client_message)
        event = self._event(("hears", who, client_message), endpoint._replace(heard=endpoint.heard[1:]), did)
        return (event._replace(heard=client_message),)

    def _go_on(self, endpoint: Endpoint, who: int) -> list[Event]:
        """The engine goes once through its loop: with a message that has arrived, or without."""
        events = []
        if endpoint.prompt:
            endpoint = endpoint._replace(prompt=False)
            return [self._event(("goes on", who), endpoint, did) for did in self.engines.go_on(endpoint.engine, None)]
        for place in self._arrivals(endpoint.inbox):
            sender, message = endpoint.inbox[place]
            rest = endpoint._replace(inbox=endpoint.inbox[:place] + endpoint.inbox[place + 1 :], seen=False)
            after = {
                Took.NOT: endpoint._replace(seen=True),
                Took.SERVED: rest,
                Took.ENTERED: rest._replace(inside=message),
            }
            for did in self.engines.go_on(endpoint.engine, message):
                events.append(self._event(("has", who, sender, message, did.took), after[did.took], did))
        if not self._is_here(endpoint, who) or self.fault is Fault.BY_ARRIVAL:
            for did in self.engines.go_on(endpoint.engine, None):
                if did.after != endpoint.engine or did.sent or did.done or did.wrong:
                    events.append(self._event(("goes on", who), endpoint, did))
        if self.exact:
            did = self.engines.pass_time(endpoint.engine)
            if did.after != endpoint.engine:
                events.append(self._event(("lets time pass", who), endpoint, did))
        return events

    def _arrivals(self, inbox: tuple[Entry, ...]) -> list[int]:
        """Return places in an inbox whose message may be served, if it has arrived."""
        if self.fault is Fault.BY_ARRIVAL:
            senders = [sender for sender, _ in inbox]
            return [place for place, sender in enumerate(senders) if sender not in senders[:place]]
        return [0] if inbox and inbox[0][1] != GONE else []

    def _is_here(self, endpoint: Endpoint, who: int) -> bool:
        """Return whether the next message has arrived for certain: it was seen, or is the engine's own."""
        return endpoint.seen or (bool(endpoint.inbox) and endpoint.inbox[0][0] == who and endpoint.inbox[0][1] != GONE)

    def _event(self, label: Label, endpoint: Endpoint, did: Did) -> Event:
        if did.wrong is not None:
            return Event(label, self.gone, wrong=did.wrong)
        sent = did.sent
        if self.fault is Fault.NOT_AT_ONCE:
            sent = tuple(((member,), message) for members, message in sent for member in members)
        after = endpoint._replace(engine=did.after, sending=sent[1:])
        return Event(label, self.number(after), sent[0] if sent else None, did.done)

    def _settled(self, number: int, who: int) -> bool:
        """Return whether no other engine can change what may happen next here, and can notice it.

        There is a message, which nobody can take away any more; the engine may do something else before it serves it,
        but whatever it does is silent.
        """
        endpoint = self.endpoints[number]
        if (
            endpoint.engine == GONE
            or endpoint.inside is not None
            or endpoint.sending
            or not endpoint.inbox
            or endpoint.inbox[0][1] == GONE
        ):
            return False
        if self.mortal and not self._is_here(endpoint, who):
            return False
        return all(event.silent for event in self.events(number, who))

    def _step(self, number: int, heard: tuple[Any, ...], label: Label) -> Event:
        """Make the step or the copy that an engine has entered.

        `heard`: aborts of which it hears while it makes a step; what the leader of the source offers in a copy.
        """
        endpoint = self.endpoints[number]
        assert endpoint.inside is not None
        after = endpoint._replace(inside=None, prompt=self.prompt and not endpoint.inbox)
        make = self.engines.copy if self.source(endpoint.inside) else self.engines.step
        return self._event(label, after, make(endpoint.engine, endpoint.inside, heard))

    def source(self, message: int) -> Group:
        """Return the group from which KV migrates by a message; empty if none does."""
        found = self.engines.messages[message]
        return found.source if isinstance(found, MigrateKV) else ()

    def offer(self, number: int) -> tuple[int, ...]:
        """Return what an engine tells all others in the copy that it has entered."""
        endpoint = self.endpoints[number]
        assert endpoint.inside is not None
        return self.engines.offer(endpoint.engine, endpoint.inside)

    def aborts(self, number: int) -> tuple[str, ...]:
        """Return the jobs whose aborts are on their way."""
        return tuple(
            client_message.name for client_message in self.endpoints[number].heard if isinstance(client_message, Abort)
        )

    # ---- messages

    def group(self, message: int) -> Group:
        """Return the group that a message is about."""
        return self.engines.messages[message].group

    def _push(self, number: int, who: int, sender: int, message: int) -> int:
        """Return the endpoint of engine `who` with one more message on its way."""
        if number == self.gone:
            return number
        endpoint = self.endpoints[number]
        inbox = endpoint.inbox + ((sender, message),) * self._copies(sender, who, message)
        return self.number(endpoint._replace(inbox=self._sorted(inbox, message, int(endpoint.seen))))

    def _sorted(self, inbox: tuple[Entry, ...], message: int, first: int) -> tuple[Entry, ...]:
        """Grants that follow each other answer one question: which of them comes first makes no difference."""
        if not isinstance(self.engines.messages[message], BlocksReserved):
            return inbox
        place = len(inbox)
        while place > first and self._answers_the_same(inbox[place - 1][1], message):
            place -= 1
        return inbox[:place] + tuple(sorted(inbox[place:]))

    def _answers_the_same(self, one: int, other: int) -> bool:
        return (
            one != GONE
            and isinstance(self.engines.messages[one], BlocksReserved)
            and self.group(one) == self.group(other)
        )

    def _copies(self, sender: int, who: int, number: int) -> int:
        message = self.engines.messages[number]
        if self.fault is Fault.GRANT_DROPPED and isinstance(message, BlocksReserved) and sender == 1:
            return 0
        if self.fault is Fault.COMMIT_DROPPED and isinstance(message, LendBlocks) and who == 1:
            return 0
        if self.fault is Fault.STEP_TWICE and isinstance(message, RunStep) and who == 1 and len(message.group) == 2:
            return 2
        return 1

    def _lose(self, number: int, sender: int) -> tuple[int, ...]:
        """Return what an endpoint may be after an engine has stopped: any number of its last messages do not arrive."""
        endpoint = self.endpoints[number]
        inbox = endpoint.inbox
        after = [number]
        for place in range(len(inbox) - 1, int(endpoint.seen) - 1, -1):
            if inbox[place][0] == sender:
                inbox = (*inbox[:place], (sender, GONE), *inbox[place + 1 :])
                after.append(self.number(endpoint._replace(inbox=inbox)))
        return tuple(after)
