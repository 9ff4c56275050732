"""What the client says to an engine."""

from __future__ import annotations

from dataclasses import dataclass

from flying_serving.layout.groups import Group


@dataclass(frozen=True)
class Job:
    """A request as its leader gets it: an id, the size of its group, its leader, tokens of its prompt and to come.

    `migrated_from`: the group that has its KV, under its id before this one.
    """

    name: str
    size: int
    leader: int
    prompt: int = 1
    tokens: int = 1
    migrated_from: Group | None = None

    @property
    def old_name(self) -> str:
        """The id that the request had before."""
        return before(self.name)


@dataclass(frozen=True)
class Order:
    """A layout order as an engine gets it."""

    size: int
    hard: bool = False


@dataclass(frozen=True)
class Abort:
    """Nobody wants a request any more."""

    name: str


@dataclass(frozen=True)
class Retain:
    """A request goes on in another group, which may fetch its KV."""

    name: str


ClientMessage = Job | Order | Abort | Retain


def request_of(job: str) -> str:
    """Return the request that a job is of: `x+1` is another try at `x`."""
    return job.partition("+")[0]


def before(job: str) -> str:
    """Return the id of a request before it was this one: of `x`, `x+1`, `x+2` ..."""
    request, _, number = job.partition("+")
    return f"{request}+{int(number) - 1}" if int(number) > 1 else request


def after(job: str) -> str:
    """Return the id that a request will have when it migrates again."""
    request, _, number = job.partition("+")
    return f"{request}+{int(number or 0) + 1}"
