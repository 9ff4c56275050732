"""What the client says to an engine."""

from __future__ import annotations

from dataclasses import dataclass

from flying_serving.layout.groups import KVSource


@dataclass(frozen=True)
class Job:
    """A request as its leader gets it: an id, the size of its group, its leader, tokens of its
    prompt and to come.

    `source`: what offers its KV. `ahead`: of so many tokens KV is only pulled yet. `offer`: the
    number under which its own KV is offered, and whether while it runs.
    """

    name: str
    size: int
    leader: int
    prompt: int = 1
    tokens: int = 1
    source: KVSource | None = None
    ahead: int | None = None
    offer: tuple[int, bool] | None = None

    def is_rest_of(self, first: Job) -> bool:
        """Return whether it goes on with what `first` is to do, and not instead of it."""
        return (
            first.offer is not None
            and self.source is not None
            and first.offer[0] == self.source.number
        )


@dataclass(frozen=True)
class Order:
    """A layout order as an engine gets it."""

    size: int
    mode: str = "weave"


@dataclass(frozen=True)
class Abort:
    """Nobody wants a request any more."""

    name: str


@dataclass(frozen=True)
class Retain:
    """A request goes on in another group, which may pull its KV under this number. Without a name:
    none does.
    """

    name: str = ""
    number: int = 0


@dataclass(frozen=True)
class TellWeights:
    """Weights are to go, or to come back: what the engine is told to do."""

    what: str


ClientMessage = Job | Order | Abort | Retain | TellWeights


def request_of(job: str) -> str:
    """Return the request that a job is of: `x+1` is another try at `x`, or another part of it."""
    return job.partition("+")[0]
