"""Visit every state that a model can reach, and tell how the first wrong one comes about."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np


class Model(Protocol):
    """States that follow each other. A state is hashable, and equal to another if the same can
    happen from both.
    """

    def follow(self, state: Any) -> Iterable[tuple[Any, Any]]:
        """What can happen next, each with a label. Raises Wrong if one of these breaks a rule."""
        ...

    def describe(self, label: Any) -> str:
        """A label in words."""
        ...

    def goal(self, label: Any) -> Hashable | None:
        """What is reached with this label that must always come within reach again, or None."""
        ...

    def over(self, state: Any) -> bool:
        """Whether everything that was to be done is done: nothing follows. Raises Wrong if it ended
        badly.
        """
        ...


class Wrong(Exception):
    """Something that must never happen has happened."""

    def __init__(self, what: str, label: Any = None) -> None:
        super().__init__(what)
        self.what = what
        self.label = label
        """What led to it from the state that was looked at; None if that state itself is wrong."""


@dataclass(frozen=True)
class Explored:
    """What an exploration found.

    Args:
        states, transitions: how many were visited: all that there are, if nothing is wrong.
        ends: how many of the states are ends at which everything is done.
        wrong: what is wrong with the first bad state, or None.
        trace: names of what happened on a shortest way to it.
    """

    states: int
    transitions: int
    ends: int
    wrong: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        counts = f"{self.states} states, {self.transitions} transitions, {self.ends} ends"
        if self.wrong is None:
            return counts
        steps = "\n".join(f"{number:4d}. {name}" for number, name in enumerate(self.trace, 1))
        return f"{counts}\n{self.wrong}, after\n{steps}"


class _Graph:
    """States in the order in which they were found, by number, and what follows each."""

    def __init__(self, first: Hashable) -> None:
        self.numbers: dict[Hashable, int] = {first: 0}
        self.states: list[Any] = [first]
        self.predecessors = array("i", [-1])
        self.starts = array("i", [0])
        self.follows = array("i")
        """Edges of state n: follows[starts[n]:starts[n + 1]]."""

    def add(self, ways: Iterable[tuple[Any, Hashable]], source: int) -> list[Any]:
        """States that follow one, with their labels, which are returned. Most of the time goes by
        here.
        """
        labels, numbers, count, follows = [], self.numbers, len(self.states), self.follows.append
        for label, state in ways:
            number = numbers.setdefault(state, count)
            if number == count:
                count += 1
                self.states.append(state)
                self.predecessors.append(source)
            follows(number)
            labels.append(label)
        return labels

    def way(self, number: int) -> list[int]:
        """States on the way from the first one to this one."""
        way = [number]
        while (number := self.predecessors[number]) >= 0:
            way.append(number)
        return way[::-1]

    def cut_off(self, ends: list[int]) -> int | None:
        """The first state from which none of these can be reached."""
        targets = np.array(self.follows)
        sources = np.repeat(np.arange(len(self.states)), np.diff(self.starts))
        leads = np.zeros(len(self.states), dtype=bool)
        leads[ends] = True
        while (more := sources[leads[targets] & ~leads[sources]]).size:
            leads[more] = True
        return None if leads.all() else int(leads.argmin())


@contextmanager
def _without_collector() -> Iterator[None]:
    """Let Python look for no cycles while the body runs: among millions of states it finds none,
    and takes a tenth of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collector()
def explore(model: Model, first: Hashable, most: int = 10_000_000) -> Explored:
    """Visit all states, breadth first, up to the first that is wrong.

    Wrong is what the model says is; a deadlock: a state that is not over and that nothing follows;
    and a state from which an end, or one of the goals of a model that has no end, can not be
    reached, whatever happens.

    Args:
        model: the rules.
        first: where to begin.
        most: how many states there may be; more are an error of the test.
    """
    graph = _Graph(first)
    ends: list[int] = []
    goals: dict[Hashable, list[int]] = {}
    number = 0
    while number < len(graph.states):
        assert len(graph.states) <= most, f"more than {most} states"
        state = graph.states[number]
        try:
            if model.over(state):
                ends.append(number)
            else:
                for label in graph.add(model.follow(state), number):
                    if (goal := model.goal(label)) is not None:
                        goals.setdefault(goal, []).append(number)
        except Wrong as wrong:
            return _bad(model, graph, ends, number, wrong)
        graph.starts.append(len(graph.follows))
        if graph.starts[-1] == graph.starts[-2] and (not ends or ends[-1] != number):
            return _bad(
                model,
                graph,
                ends,
                number,
                Wrong("deadlock: nothing can happen, and not all is done"),
            )
        number += 1
    for goal, states in (goals or {"an end": ends}).items():
        lost = graph.cut_off(states)
        if lost is not None:
            return _bad(model, graph, ends, lost, Wrong(f"from here on nothing leads to {goal}"))
    return Explored(len(graph.states), len(graph.follows), len(ends))


def _bad(model: Model, graph: _Graph, ends: list[int], number: int, wrong: Wrong) -> Explored:
    labels = list(_labels(model, [graph.states[n] for n in graph.way(number)]))
    if wrong.label is not None:
        labels.append(wrong.label)
    trace = [model.describe(label) for label in labels]
    return Explored(len(graph.states), len(graph.follows), len(ends), wrong.what, tuple(trace))


def _labels(model: Model, way: list[Any]) -> Iterator[Any]:
    for state, after in pairwise(way):
        yield next(label for label, follows in model.follow(state) if follows == after)
