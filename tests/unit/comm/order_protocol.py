"""A model of how engines step together, small enough to visit every state that it can reach.

A leader takes one number for each member (comm/order.py), and sends the message to each; messages
arrive in any order, one by one (engine/channel.py). An engine handles the message whose number is
next, and is then inside the step until all members are: nothing inside a step waits for anything
else. In between it may run a step of its own lane.

Two things can be left out, to see that they are needed: that numbers are taken at once, and that
numbers decide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flying_serving.layout.groups import Group

Message = tuple[int, int]
"""(number at this member, group)."""


@dataclass(frozen=True)
class State:
    """Everything that is going on. Tuples are by engine, or by group where it says so."""

    next_number: tuple[int, ...]
    under_way: tuple[frozenset[Message], ...]
    arrived: tuple[tuple[Message, ...], ...]
    """In the order of arrival."""
    served: tuple[int, ...]
    inside: tuple[int | None, ...]
    """The group that an engine is in a step of."""
    taking: tuple[int, ...]
    """By group: how many members its leader has taken numbers of, if it is in the middle of
    that.
    """
    to_order: tuple[int, ...]
    """By group: steps to come."""
    outstanding: tuple[bool, ...]
    """By group: whether a step is planned and not done."""
    local: tuple[int, ...]
    """Steps of an engine's own lane to come."""


@dataclass(frozen=True)
class Protocol:
    """The rules by which states follow each other: a Model of `tests/explorer.py`.

    Args:
        groups: the groups; the first member leads.
        at_once: whether a leader takes the numbers of all members in one step, under the lock.
        by_number: whether members serve by number, not by time of arrival.
    """

    groups: tuple[Group, ...]
    at_once: bool = True
    by_number: bool = True

    def first(self, group_steps: int, local_steps: tuple[int, ...]) -> State:
        """Return the state in which nothing has happened: steps to come for each group, and for
        each engine.
        """
        count, engines = len(self.groups), len(local_steps)
        return State(
            next_number=(0,) * engines,
            under_way=(frozenset(),) * engines,
            arrived=((),) * engines,
            served=(0,) * engines,
            inside=(None,) * engines,
            taking=(0,) * count,
            to_order=(group_steps,) * count,
            outstanding=(False,) * count,
            local=local_steps,
        )

    def follow(self, state: State) -> Iterator[tuple[str, State]]:
        """Return what can happen next, each with its name."""
        for g, group in enumerate(self.groups):
            yield from self._order(state, g, group)
            if all(state.inside[member] == g for member in group):
                inside = tuple(None if e in group else at for e, at in enumerate(state.inside))
                yield (
                    f"{group} step",
                    replace(state, inside=inside, outstanding=put(state.outstanding, g, False)),
                )
        for engine in range(len(state.served)):
            for message in state.under_way[engine]:
                rest = put(state.under_way, engine, state.under_way[engine] - {message})
                arrived = put(state.arrived, engine, (*state.arrived[engine], message))
                name = f"{engine} hears of {self.groups[message[1]]}"
                yield name, replace(state, under_way=rest, arrived=arrived)
            if state.inside[engine] is None and not self._is_taking(state, engine):
                yield from self._serve(state, engine)
                if state.local[engine]:
                    yield (
                        f"{engine} alone",
                        replace(state, local=put(state.local, engine, state.local[engine] - 1)),
                    )

    def over(self, state: State) -> bool:
        """Whether everything that was to be done is done."""
        to_come = any(state.to_order) or any(state.outstanding) or any(state.local)
        return not (to_come or any(state.under_way))

    def describe(self, label: str) -> str:
        """What happened, in words."""
        return label

    def goal(self, label: str) -> None:
        """Nothing but an end has to be reached."""

    def _is_taking(self, state: State, engine: int) -> bool:
        return any(state.taking[g] for g, group in enumerate(self.groups) if group[0] == engine)

    def _order(self, state: State, g: int, group: Group) -> Iterator[tuple[str, State]]:
        leader, taken = group[0], state.taking[g]
        if taken == 0:
            busy = state.inside[leader] is not None or self._is_taking(state, leader)
            if busy or state.outstanding[g] or not state.to_order[g]:
                return
            state = replace(
                state,
                outstanding=put(state.outstanding, g, True),
                to_order=put(state.to_order, g, state.to_order[g] - 1),
            )
        members = group if self.at_once else group[taken : taken + 1]
        for member in members:
            state = self._take(state, leader, member, g)
        taken = (taken + len(members)) % len(group)
        yield (
            f"{leader} orders {group} of {members}",
            replace(state, taking=put(state.taking, g, taken)),
        )

    def _take(self, state: State, leader: int, member: int, g: int) -> State:
        message = (state.next_number[member], g)
        state = replace(
            state, next_number=put(state.next_number, member, state.next_number[member] + 1)
        )
        if member == leader:
            return replace(
                state, arrived=put(state.arrived, member, (*state.arrived[member], message))
            )
        return replace(
            state, under_way=put(state.under_way, member, state.under_way[member] | {message})
        )

    def _serve(self, state: State, engine: int) -> Iterator[tuple[str, State]]:
        arrived = state.arrived[engine]
        if self.by_number:
            message = next((m for m in arrived if m[0] == state.served[engine]), None)
        else:
            message = arrived[0] if arrived else None
        if message is not None:
            yield (
                f"{engine} comes to {self.groups[message[1]]}",
                replace(
                    state,
                    arrived=put(state.arrived, engine, tuple(m for m in arrived if m != message)),
                    served=put(state.served, engine, state.served[engine] + 1),
                    inside=put(state.inside, engine, message[1]),
                ),
            )


def put(values: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    """Return a tuple with one value changed."""
    return (*values[:index], value, *values[index + 1 :])
