"""What engines of the model are made with, and what they are told when they go once through their
loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from flying_serving.layout.groups import Group
from tests.with_vllm.protocol.weights import extra_of

ANSWERED = "weights"
"""In place of a request that is completed: the engine has done what it was told of its weights."""


class Took(Enum):
    """What became of the message that an engine had when it went through its loop."""

    NOT = "it did something else first"
    SERVED = "it was served"
    ENTERED = "the engine has entered its step, and waits for the other members"
    READ = "it has read offers, and goes on to copy the KV"


@dataclass(frozen=True)
class Settings:
    """What engines are made with.

    Args:
        blocks: physical blocks of each, one of them null.
        lend_blocks: how many a leader asks for, at the least.
        endless: lanes that have work without end and need no blocks, by group; the others have none
            at all.
        exact: whether it is kept how long ago things were, with a tick for each step, and more
            ticks at any time. If not, any wait and any pause may be over at any time, which allows
            all that can really happen, and more.
        chunk: tokens that a scheduler plans for a step, at the most.
        stalls: whether who waits for KV to be offered, with blocks, may give up only because it has
            waited long enough.
        retains: whether KV that is kept goes only when it was pulled, or a request needs its
            blocks.
        engines: how many there are.
        widest: size of the widest groups.
        pieces: pages of each piece of weights that may be lent.
        diverging: engines that may sample other tokens than their leader, in any step.
    """

    blocks: int = 3
    lend_blocks: int = 1
    endless: tuple[Group, ...] = ()
    exact: bool = False
    chunk: int = 8
    stalls: bool = True
    retains: bool = False
    engines: int = 4
    widest: int = 4
    pieces: tuple[int, ...] = ()
    diverging: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the sizes of groups."""
        return tuple(size for size in (1, 2, 4) if size <= min(self.widest, self.engines))

    @property
    def all_blocks(self) -> int:
        """Return how many blocks there are when all pieces are gone."""
        return extra_of(self.blocks, self.pieces).stop


class Overdue(NamedTuple):
    """Which waits of requests that migrate are over.

    Args:
        arrivals: of those that wait for their KV, or for room for it.
        retained: of those whose KV waits to be fetched.
        weights: of the next piece of weights, which goes or comes at once.
    """

    arrivals: bool = False
    retained: bool = False
    weights: bool = False
