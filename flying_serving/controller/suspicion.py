"""Requests that may have caused the loss of an engine, and the number of suspects with which one is
tried again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Trial = tuple[bool, int, frozenset[int]]
"""Fields of `Suspicion`: whether the last engine is spared, the suspects that a group may have,
engines to avoid.
"""


@dataclass(frozen=True)
class Suspicion:
    """The evidence of the losses of a request's groups.

    Without any it is not suspected (`TRUSTED`).

    `losses`: engines that its groups have lost while they may have computed its prompt; engines
    lost together count as one. `max_suspects`: the most suspects that a group may have while it is
    one of them. None: it is not suspected, since its engine was killed from outside, or it rests.
    `avoids`: the engines of the last of these groups, until one of them is back: others of them
    would have been lost by then.

    A suspicion *rests* once the group has given the request a token: what it does there kills no
    engine. The request stays in that group. In another one it is the same suspect. `rested`: its
    `max_suspects` then.
    """

    losses: int = 0
    max_suspects: int | None = None
    avoids: frozenset[int] = frozenset()
    rested: int | None = None

    @classmethod
    def of_killed(cls) -> Suspicion:
        """Return the suspicion of a request whose engine was killed from outside: only a note that
        this has happened once.
        """
        return cls(1)

    def resting(self) -> Suspicion:
        """Return the suspicion of the request once its group has given it a token."""
        if self.max_suspects is None:
            return self if self.rests else TRUSTED
        return replace(self, max_suspects=None, rested=self.max_suspects)

    def awake(self) -> Suspicion:
        """Return the suspicion of the request once it has left its group."""
        return replace(self, max_suspects=self.rested, rested=None) if self.rests else self

    @property
    def rests(self) -> bool:
        """True if it is a suspect in other groups than its own."""
        return self.rested is not None

    @property
    def spares_last(self) -> bool:
        """True if it gets no group without which no engine is left."""
        return self.losses > 1 and self.max_suspects is not None

    @property
    def trial(self) -> Trial | None:
        """The fields that decide which groups may have it; None if it is not suspected."""
        return (
            None
            if self.max_suspects is None
            else (self.spares_last, self.max_suspects, self.avoids)
        )

    def without(self, engine: int) -> Suspicion:
        """Return the same suspicion once an engine is back."""
        return replace(self, avoids=frozenset()) if engine in self.avoids else self

    @property
    def is_certain(self) -> bool:
        """True if its group was lost again, in which it might have no other suspect beside it: it
        is not tried again.

        Prompts that had begun there meanwhile do not count. Otherwise a request that kills engines
        could have new ones beside it each time.
        """
        return self.max_suspects == 0


TRUSTED = Suspicion()
"""The suspicion of a request whose groups have lost no engine, or whose token has ended it."""


def suspected(before: Suspicion, suspects: int, group: frozenset[int]) -> Suspicion:
    """Return the suspicion of a request whose group has lost an engine, as one of `suspects` there.

    Half as many may be in a group next time. So a prompt that kills engines is alone after about
    log2(suspects) losses, even if others come to its groups meanwhile.
    """
    before = before.awake()
    if before.max_suspects is None:
        max_suspects = max(1, suspects // 2)
    else:
        max_suspects = min(before.max_suspects, suspects) // 2
    return Suspicion(before.losses + 1, max_suspects, group)
