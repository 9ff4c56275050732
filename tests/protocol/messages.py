"""What the client says to an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """A request as its leader gets it: an id, the size of its group, its leader, tokens of its prompt and to come."""

    name: str
    size: int
    leader: int
    prompt: int = 1
    tokens: int = 1


@dataclass(frozen=True)
class Order:
    """A layout order as an engine gets it."""

    size: int
    hard: bool = False


@dataclass(frozen=True)
class Abort:
    """Nobody wants a request any more."""

    name: str


Message = Job | Order | Abort
