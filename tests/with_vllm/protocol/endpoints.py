"""One engine with all that is on its way to it, and with what it has yet to send: what happens
there, by number.

A message has its place in an engine's inbox as soon as its number is taken, arrives some time
later, and is served in its place: what `comm/order.py` and `engine/messages.py` do. A client's
messages arrive in order, some time later.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from flying_serving.layout.groups import Group
from flying_serving.migration.messages import PullKV
from tests.with_vllm.protocol.automaton import NOTHING, Did, Engines
from tests.with_vllm.protocol.client import Abort, ClientMessage
from tests.with_vllm.protocol.engine import Engine
from tests.with_vllm.protocol.events import Event, Label, Sent
from tests.with_vllm.protocol.faults import Fault
from tests.with_vllm.protocol.inboxes import GONE, Entry, arrives, sort_reserved
from tests.with_vllm.protocol.offers import Look, View, look_at, look_into, look_where
from tests.with_vllm.protocol.sampling import Draw
from tests.with_vllm.protocol.settings import Overdue, Took


class Endpoint(NamedTuple):
    """An engine, and all that is on its way from it and to it.

    Args:
        engine: number of its state.
        inside: the message to whose step it has come, while the others have not all come.
        inbox: in the order of their places.
        seen: whether the first of these is known to have arrived.
        sending: messages that the engine sends, one after the other.
        heard: what is on its way from the client.
        prompt: whether the engine has just come out of a step, and goes through its loop before a
            message arrives.
        views: what it saw when it read offers, while it has yet to copy what they offer.
        overdue: which waits were over then.
        left: number of the state of an engine that has stopped: others still see its memory.
    """

    engine: int
    inside: int | None = None
    inbox: tuple[Entry, ...] = ()
    seen: bool = False
    sending: tuple[Sent, ...] = ()
    heard: tuple[ClientMessage, ...] = ()
    prompt: bool = False
    views: tuple[View, ...] = ()
    overdue: Overdue | None = None
    left: int | None = None


class Endpoints:
    """All endpoints that were met, by number, for one exploration.

    Args:
        engines: their engines.
        exact: whether time passes by itself (`Settings.exact`).
        prompt: whether an engine that comes out of a step has gone through its loop before a
            message arrives that was not there yet.
        mortal: whether an engine may stop, and messages that it has sent go with it.
        fault: what is broken.
    """

    def __init__(
        self, engines: Engines, *, exact: bool, prompt: bool, mortal: bool, fault: Fault | None
    ) -> None:
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
        self.looks = cache(self._looks)
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
        if endpoint.engine == GONE:
            return number
        return self.number(endpoint._replace(heard=(*endpoint.heard, client_message)))

    def is_gone(self, number: int) -> bool:
        """Return whether the engine has stopped."""
        return self.endpoints[number].engine == GONE

    def stop(self, number: int) -> int:
        """Return the endpoint of an engine that stops."""
        state = self.endpoints[number].engine
        facts = self.engines.facts[state]
        return self.number(Endpoint(GONE, left=state)) if facts.offers or facts.rows else self.gone

    # ---- what is seen

    def _looks(self, number: int, who: int) -> tuple[Look, ...]:
        """Return at what of other engines this one may look when it goes through its loop."""
        endpoint = self.endpoints[number]
        if endpoint.engine == GONE or endpoint.sending:
            return ()
        sources = self.engines.facts[endpoint.engine].sources
        looks = [look_at(source) for source, _ in sources]
        if endpoint.inside is not None:
            return tuple(looks) if self.aborts(number) else ()
        first, last = (dict(endpoint.views[place]) if endpoint.views else {} for place in (0, -1))
        for source, size in sources:
            if size == 1 and self.engines.facts[endpoint.engine].lends:
                looks += look_where(source, (who,), who)
            offer = first.get(look_at(source)) if size == 1 else None
            looks += look_into(source, offer.blocks, (who,), who, last) if offer is not None else []
        message = (
            self.engines.messages[endpoint.inbox[0][1]] if self._arrivals(endpoint.inbox) else None
        )
        if isinstance(message, PullKV):
            looks += look_into(message.source, message.source_blocks, message.group, who)
        return tuple(dict.fromkeys(looks))

    def see(self, number: int, look: Look) -> Any:
        """Return what is seen of an engine, which may have stopped."""
        endpoint = self.endpoints[number]
        state = endpoint.left if endpoint.engine == GONE else endpoint.engine
        if state is not None:
            return self.engines.facts[state].seen(look)
        return None if isinstance(look.what, int) else (NOTHING,) * len(look.what)

    # ---- what may happen

    def _events(self, number: int, who: int, view: View) -> tuple[Event, ...]:
        """Return all that may happen next at the endpoint of engine `who`, which sees this of the
        others.
        """
        endpoint = self.endpoints[number]
        if endpoint.engine == GONE or endpoint.inside is not None:
            return ()
        if endpoint.sending:
            return (
                Event(
                    ("sends on", who),
                    self.number(endpoint._replace(sending=endpoint.sending[1:])),
                    endpoint.sending[0],
                ),
            )
        return (*self._hear(endpoint, who, view), *self._go_on(endpoint, who, view))

    def _kinds(
        self, number: int, who: int, view: View
    ) -> tuple[tuple[tuple[Label, int], ...], tuple[Event, ...]]:
        """Return labels and ends of the events that are local, and all other events."""
        events = self.events(number, who, view)
        local = tuple((event.label, event.after) for event in events if event.local)
        return local, tuple(event for event in events if not event.local)

    def _hear(self, endpoint: Endpoint, who: int, view: View) -> tuple[Event, ...]:
        if not endpoint.heard or endpoint.views:
            return ()
        client_message = endpoint.heard[0]
        did = self.engines.hear(
            endpoint.engine, client_message, view if isinstance(client_message, Abort) else ()
        )
        event = self._event(
            ("hears", who, client_message), endpoint._replace(heard=endpoint.heard[1:]), did
        )
        return (event._replace(heard=client_message),)

    def _go_on(self, endpoint: Endpoint, who: int, view: View) -> list[Event]:
        """The engine goes once through its loop: with a message that has arrived, or without."""
        events = []
        views, overdue = (*endpoint.views, view), endpoint.overdue
        before, endpoint = endpoint, endpoint._replace(prompt=False, views=(), overdue=None)
        for did in self.engines.go_on(endpoint.engine, None, views, overdue):
            if did.took is Took.READ:
                offers = tuple(pair for pair in view if not isinstance(pair[0].what, tuple))
                read = before._replace(
                    views=views if before.views else (offers,), overdue=did.overdue
                )
                events.append(self._event(("reads an offer", who), read, did))
        for place in [] if before.prompt else self._arrivals(endpoint.inbox):
            sender, message = endpoint.inbox[place]
            rest = endpoint._replace(
                inbox=endpoint.inbox[:place] + endpoint.inbox[place + 1 :], seen=False
            )
            after = {
                Took.NOT: endpoint._replace(seen=True),
                Took.SERVED: rest,
                Took.ENTERED: rest._replace(inside=message),
            }
            for did in self.engines.go_on(endpoint.engine, message, views, overdue):
                if did.took is not Took.READ:
                    events.append(
                        self._event(("has", who, sender, message, did.took), after[did.took], did)
                    )
        if not self._is_here(endpoint, who) or self.fault is Fault.BY_ARRIVAL or before.prompt:
            for did in self.engines.go_on(endpoint.engine, None, views, overdue):
                if did.took is not Took.READ:
                    events.append(self._event(("goes on", who), endpoint, did))
        if self.exact:
            events.append(
                self._event(
                    ("lets time pass", who), endpoint, self.engines.pass_time(endpoint.engine)
                )
            )
        same = self.number(before)
        return [event for event in events if event.after != same or not event.silent]

    def _arrivals(self, inbox: tuple[Entry, ...]) -> list[int]:
        """Return places in an inbox whose message may be served, if it has arrived."""
        if self.fault is Fault.BY_ARRIVAL:
            senders = [sender for sender, _ in inbox]
            return [place for place, sender in enumerate(senders) if sender not in senders[:place]]
        return [0] if inbox and inbox[0][1] != GONE else []

    def _is_here(self, endpoint: Endpoint, who: int) -> bool:
        """Return whether the next message has arrived for certain: it was seen, or is the engine's
        own.
        """
        return endpoint.seen or (
            bool(endpoint.inbox) and endpoint.inbox[0][0] == who and endpoint.inbox[0][1] != GONE
        )

    def _event(self, label: Label, endpoint: Endpoint, did: Did) -> Event:
        if did.wrong is not None:
            return Event(label, self.gone, wrong=did.wrong)
        sent = did.sent
        if self.fault is Fault.NOT_AT_ONCE:
            sent = tuple(((member,), message) for members, message in sent for member in members)
        after = endpoint._replace(engine=did.after, sending=sent[1:])
        return Event(
            label,
            self.number(after),
            sent[0] if sent else None,
            did.done,
            failed=did.failed,
            given=did.given,
        )

    def _settled(self, number: int, who: int) -> bool:
        """Return whether no other engine can change what may happen next here, and can notice it.

        There is a message, which nobody can take away any more; the engine may do something else
        before it serves it, but whatever it does is silent, and does not change what others may
        see; nor does it look at others.
        """
        endpoint = self.endpoints[number]
        if (
            endpoint.engine == GONE
            or endpoint.inside is not None
            or endpoint.sending
            or not endpoint.inbox
            or endpoint.inbox[0][1] == GONE
            or self.looks(number, who)
        ):
            return False
        if self.mortal and not self._is_here(endpoint, who):
            return False
        shown = self._shown(number)
        return all(
            event.silent and self._shown(event.after) == shown
            for event in self.events(number, who, ())
        )

    def _shown(self, number: int) -> int:
        return self.engines.facts[self.endpoints[number].engine].shown

    def _step(
        self, number: int, aborting: tuple[str, ...], label: Label, view: View, draw: Draw
    ) -> Event:
        """Make the step that an engine has entered; `aborting`: aborts of which it hears while it
        makes it; `draw`: the tokens that it samples.
        """
        endpoint = self.endpoints[number]
        assert endpoint.inside is not None
        after = endpoint._replace(inside=None, prompt=self.prompt and not endpoint.inbox)
        return self._event(
            label, after, self.engines.step(endpoint.engine, endpoint.inside, aborting, view, draw)
        )

    def aborts(self, number: int) -> tuple[str, ...]:
        """Return the jobs whose aborts are on their way."""
        return tuple(
            client_message.name
            for client_message in self.endpoints[number].heard
            if isinstance(client_message, Abort)
        )

    # ---- messages

    def group(self, message: int) -> Group:
        """Return the group that a message is about."""
        return self.engines.messages[message].group

    def _push(self, number: int, who: int, sender: int, message: int) -> int:
        """Return the endpoint of engine `who` with one more message on its way."""
        if self.is_gone(number):
            return number
        endpoint = self.endpoints[number]
        messages = self.engines.messages
        inbox = endpoint.inbox + ((sender, message),) * arrives(
            self.fault, sender, who, messages[message]
        )
        return self.number(
            endpoint._replace(inbox=sort_reserved(inbox, int(endpoint.seen), messages))
        )

    def _lose(self, number: int, sender: int) -> tuple[int, ...]:
        """Return what an endpoint may be after an engine has stopped: any number of its last
        messages do not arrive.
        """
        endpoint = self.endpoints[number]
        inbox = endpoint.inbox
        after = [number]
        for place in range(len(inbox) - 1, int(endpoint.seen) - 1, -1):
            if inbox[place][0] == sender:
                inbox = (*inbox[:place], (sender, GONE), *inbox[place + 1 :])
                after.append(self.number(endpoint._replace(inbox=inbox)))
        return tuple(after)
