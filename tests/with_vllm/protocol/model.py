"""Four engines and a client: everything that can happen next, in every state."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from flying_serving.engine.messages import ReclaimBlocks
from flying_serving.layout.groups import Group, Layout
from tests.explorer import Wrong
from tests.with_vllm.protocol.automaton import Engines, Facts
from tests.with_vllm.protocol.client import Order, request_of
from tests.with_vllm.protocol.dispatching import Dispatcher
from tests.with_vllm.protocol.endpoints import Endpoints
from tests.with_vllm.protocol.engine import Engine
from tests.with_vllm.protocol.events import Event, Label, Sent
from tests.with_vllm.protocol.faults import Fault
from tests.with_vllm.protocol.offers import View
from tests.with_vllm.protocol.sampling import Draw, Seen, check_outputs, check_samples, draws
from tests.with_vllm.protocol.scenario import Client, Lent, Scenario, Status
from tests.with_vllm.protocol.settings import ANSWERED
from tests.with_vllm.protocol.tracing import describe

State = tuple[int, ...]
"""The endpoints of all engines, and the client, by number."""


class ProtocolModel:
    """The rules by which states follow each other: a Model for `explore`.

    Args:
        scenario: what there is to do.
        fault: what is broken.
        reduce: whether orders of events are left out that make no difference (`_first`).
    """

    def __init__(
        self, scenario: Scenario, fault: Fault | None = None, *, reduce: bool = True
    ) -> None:
        self.scenario = scenario
        self.fault = fault
        sizes, engines = scenario.settings.sizes, scenario.settings.engines
        self._engines = range(engines)
        self._groups = [
            group for size in sizes[1:] for group in Layout.uniform(engines, size).groups
        ]
        self.endless = bool(scenario.settings.endless)
        self.reduce = reduce and fault is not Fault.BY_ARRIVAL
        exact = scenario.settings.exact
        self.engines = Engines(exact=exact, most_overdue=scenario.most_overdue)
        self.endpoints = Endpoints(
            self.engines,
            exact=exact,
            prompt=scenario.prompt,
            mortal=bool(scenario.mortal),
            fault=fault,
        )
        self.client = Dispatcher(scenario, self.endpoints, fault)
        self._mobile = frozenset(request_of(job.name) for job in scenario.jobs if job.source)
        self._sizes = {
            job.source.number: len(job.source.group) for job in scenario.jobs if job.source
        }
        self._sizes |= {job.offer[0]: job.size for job in scenario.jobs if job.offer}
        self._clients: list[Client] = []
        self._client_numbers: dict[Client, int] = {}
        self._are_quiet: dict[int, tuple[bool, ...]] = {}

    def first(self) -> State:
        """Return the state in which nothing has happened yet, but that the client has sent its
        first stage.
        """
        endpoints = [self.endpoints.take(self._make(engine)) for engine in self._engines]
        client = Client(
            ((Status.OPEN, None, None),) * len(self.client.numbers), weights=self.scenario.weights
        )
        return self._state(*self.client.begin_stages(endpoints, client))

    def _make(self, number: int) -> Engine:
        engine = Engine(number, self.scenario.settings, self.fault, self._mobile, self._sizes)
        engine.hear(Order(self.scenario.first[number], self.scenario.mode))
        if self.scenario.weights is Lent.LENT and number < self.scenario.settings.sizes[-1]:
            assert engine.weights is not None
            engine.weights.lend_at_once()
        count = self.scenario.settings.lend_blocks
        for group in self.scenario.lent:
            if number in group:
                engine.loop.lanes.members[len(group)].lent.reserve(count)
                engine.loop.lanes.members[len(group)].lent.commit(list(range(1, count + 1)))
            if number == group[0]:
                borrowed = engine.loop.lanes.leaders[len(group)].borrowed
                borrowed.add(borrowed.choose(count))
        return engine

    def _state(self, endpoints: list[int], client: Client) -> State:
        number = self._client_numbers.setdefault(client, len(self._clients))
        if number == len(self._clients):
            self._clients.append(client)
        return (*endpoints, number)

    # ---- the model

    def over(self, state: State) -> bool:
        """Return whether all requests are accounted for, and nothing is left over anywhere."""
        client = self._clients[state[-1]]
        if client.ended:
            return True
        if (
            self.endless
            or client.lost
            or client.unanswered
            or client.awaited
            or client.stage < len(self.scenario.stages) - 1
        ):
            return False
        if any(status is Status.OPEN for status, *_ in client.requests) or not all(
            map(self._is_at_rest, state[:-1])
        ):
            return False
        self._check_lending(state)
        for group in self._groups if self.scenario.settings.diverging else ():
            check_samples(group, self._facts(state, group))
        return True

    def _is_at_rest(self, number: int) -> bool:
        """Return whether an engine has nothing more to do."""
        endpoint = self.endpoints.endpoints[number]
        is_waiting = (
            endpoint.inside is None
            and not endpoint.sending
            and not endpoint.heard
            and not endpoint.inbox
        )
        facts = self.engines.facts[endpoint.engine]
        return is_waiting and not facts.busy and not any(facts.waits)

    def follow(self, state: State) -> Iterator[tuple[Label, State]]:
        """Return what can happen next."""
        first = self._first(state) if self.reduce else None
        if first is not None:
            yield from self._at(state, first)
            return
        for engine in self._engines:
            yield from self._at(state, engine)
        for group in self._groups:
            if self.endpoints.inside[state[group[0]]] is not None:
                yield from self._step(state, group)
        if self.scenario.aborts:
            yield from self._abort(state)
        if self.scenario.mortal:
            yield from self._stop(state)

    def _first(self, state: State) -> int | None:
        """Return an engine that may as well go first: what it does next can be the next thing that
        happens at all.

        It has a message, and the client will say nothing new to it; so nothing that others do gives
        it another choice. And none of its choices sends anything, completes a request, or depends
        on or changes what engines see of each other's KV; so whatever others do, they can do before
        it or after it, and it comes to the same. Hence every end, and every wrong, that is reached
        in another order is reached in one in which this engine goes first. (A persistent set. It
        does not put the others off for ever: with finite work an engine has finitely much to do
        before it serves its message.)
        """
        settled = self.endpoints.settled
        for engine, is_quiet in enumerate(self._quiet(state)):
            if is_quiet and settled(state[engine], engine):
                return engine
        return None

    def _quiet(self, state: State) -> tuple[bool, ...]:
        """Return, by engine, whether the client has sent it all that it ever will."""
        quiet = self._are_quiet.get(state[-1])
        if quiet is None:
            quiet = self._are_quiet[state[-1]] = self.client.are_quiet(self._clients[state[-1]])
        return quiet

    # ---- engines

    def _at(self, state: State, engine: int) -> Iterator[tuple[Label, State]]:
        """What happens at one engine."""
        local, others = self.endpoints.kinds(state[engine], engine, self._view(state, engine))
        before, behind = state[:engine], state[engine + 1 :]
        for label, place in local:
            yield label, (*before, place, *behind)
        for event in others:
            if (
                event.sent is not None
                and event.label[0] != "sends on"
                and self._is_repeated(state, engine, event.sent)
            ):
                event = event._replace(sent=None)
            after = self._after(state, engine, event)
            if isinstance(event.heard, Order):
                client = self._clients[state[-1]]
                client = client._replace(unanswered=client.unanswered - {engine})
                after = self._state(*self.client.begin_stages(list(after[:-1]), client))
            yield event.label, after

    def _view(self, state: State, engine: int) -> View:
        """What an engine sees of the others."""
        looks = self.endpoints.looks(state[engine], engine)
        return tuple((look, self.endpoints.see(state[look.engine], look)) for look in looks)

    def _is_repeated(self, state: State, engine: int, sent: Sent) -> bool:
        """Whether a member reclaims blocks while a ReclaimBlocks is under way: that is not sent, or
        states had no end.

        It may ask again after ASK_AGAIN_S; here it does so when its leader has dealt with what it
        asked before.
        """
        (leader, *_), message = sent
        is_need = isinstance(self.engines.messages[message], ReclaimBlocks)
        return is_need and (engine, message) in self.endpoints.endpoints[state[leader]].inbox

    def _after(self, state: State, engine: int, event: Event) -> State:
        if event.wrong is not None:
            raise Wrong(event.wrong, event.label)
        endpoints = list(state)
        endpoints[engine] = event.after
        if event.sent is not None:
            members, message = event.sent
            for member in members:
                endpoints[member] = self.endpoints.push(endpoints[member], member, engine, message)
        if event.done or event.failed:
            client = self._clients[endpoints.pop()]
            for name in event.failed:
                client = self.client.fail(client, name, event.label)
            for name in event.done:
                if name == ANSWERED:
                    client = self.client.answer(endpoints, client, engine)
                    continue
                client = self.client.complete(endpoints, client, name, event.label)
            return self._state(*self.client.begin_stages(endpoints, client))
        return tuple(endpoints)

    def _step(self, state: State, group: Group) -> Iterator[tuple[Label, State]]:
        """When all members of a group have come to a step of it, it is made."""
        messages = [self.endpoints.endpoints[state[engine]].inside for engine in group]
        if any(message is None or self.endpoints.group(message) != group for message in messages):
            return
        label = ("step", group, *dict.fromkeys(messages))
        if len(label) > 3:
            raise Wrong("a collective whose members have come to different steps", label)
        diverging = self.scenario.settings.diverging
        # aborts that the leader hears of during the step come before the step's output
        for early in {(), self.endpoints.aborts(state[group[0]])}:
            heard = dict.fromkeys(group, ()) | {group[0]: early}
            if not diverging:
                yield label, self._together(state, label, heard)
                continue
            for other, order in draws(group, diverging, self._facts(state, group)):
                apart = label if other is None else ("step apart", group, other, messages[0])
                yield apart, self._together(state, apart, heard, other, order)

    def _together(
        self,
        state: State,
        label: Label,
        heard: dict[int, tuple[Any, ...]],
        other: int | None = None,
        order: Group = (),
    ) -> State:
        """A step of a group. `heard`: aborts of which each member hears. `other`: the member that
        samples other tokens. `order`: in which they end it.
        """
        after, group = state, tuple(heard)
        for engine in order or group:
            seen: Seen = ()
            if order and engine == group[0]:  # the leader looks at the board
                facts = self._facts(after, group)
                seen = tuple((e, one.samples.noted.get(len(group), (0, 0))) for e, one in facts)
            view = self._view(state, engine) if heard[engine] else ()
            draw = Draw(engine == other, seen)
            event = self.endpoints.step(after[engine], heard[engine], label, view, draw)
            if seen:
                check_outputs(event, group, self._facts(state, group))
            after = self._after(after, engine, event)
        return after

    def _facts(self, state: State, group: Group) -> list[tuple[int, Facts]]:
        """Return the facts of each member."""
        endpoints = self.endpoints.endpoints
        return [(e, self.engines.facts[endpoints[state[e]].engine]) for e in group]

    def _abort(self, state: State) -> Iterator[tuple[Label, State]]:
        for name in self.scenario.aborts:
            endpoints = list(state[:-1])
            client = self.client.abort(endpoints, self._clients[state[-1]], name)
            if client is not None:
                yield ("abort", name), self._state(*self.client.begin_stages(endpoints, client))

    # ---- loss

    def _stop(self, state: State) -> Iterator[tuple[Label, State]]:
        """An engine stops; those that are in a step with one that has stopped give up and stop; the
        server ends.
        """
        client = self._clients[state[-1]]
        if not client.lost:
            for engine in self.scenario.mortal:
                yield from self._die(state, engine, ("stops", engine))
            return
        for engine in self._engines:
            message = self.endpoints.endpoints[state[engine]].inside
            if message is not None and not self._is_whole(self.endpoints.group(message), state):
                yield from self._die(state, engine, ("gives up, and stops", engine))
        requests = tuple(
            (Status.LOST if s is Status.OPEN else s, None, None) for s, *_ in client.requests
        )
        end = Client(requests, client.stage, frozenset(), lost=True, ended=True)
        yield ("the server ends",), self._state([self.endpoints.gone] * len(self._engines), end)

    def _die(self, state: State, engine: int, label: Label) -> Iterator[tuple[Label, State]]:
        """With an engine go any of its messages that have not arrived yet."""
        client = self._clients[state[-1]]
        for left in product(
            *(self.endpoints.lose(state[other], engine) for other in self._engines)
        ):
            endpoints = list(left)
            endpoints[engine] = self.endpoints.stop(endpoints[engine])
            yield (
                label,
                self._state(
                    endpoints, client._replace(lost=True, unanswered=client.unanswered - {engine})
                ),
            )

    def _is_whole(self, group: Group, state: State) -> bool:
        return all(not self.endpoints.is_gone(state[engine]) for engine in group)

    # ---- books and names

    def _check_lending(self, state: State) -> None:
        """When no message is under way, members have lent exactly what their leaders have
        borrowed.
        """
        facts = [
            self.engines.facts[self.endpoints.endpoints[number].engine] for number in state[:-1]
        ]
        for group in self._groups:
            borrowed = facts[group[0]].borrowed[len(group)]
            for engine in group:
                lent, reserved = facts[engine].lent[len(group)]
                if lent != borrowed or reserved:
                    books = (
                        f"{group} has borrowed {set(borrowed)}; {engine} has lent "
                        f"{set(lent)}, reserves {reserved}"
                    )
                    raise Wrong(books)

    def goal(self, label: Label) -> str | None:
        """Return, where work has no end, of which group a step is made: each must always make
        another.
        """
        return f"a step of {label[1]}" if self.endless and label[0] == "step" else None

    def describe(self, label: Label) -> str:
        """Return what happened, as text."""
        return describe(label, self.engines.messages)
