"""Requests that may be why an engine was lost, and with how many others of them one is tried
again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

Trial = tuple[bool, int, frozenset[int]]
"""Whether the last engine is spared, how many suspects a group may have, engines to avoid: see
`Suspicion`.
"""


@dataclass(frozen=True)
class Suspicion:
    """What the losses of a request's groups say of it, since its last token.

    `losses`: engines that its groups have lost while they may have computed its prompt, together
    counted as one. `company`: how many suspects a group may have while it is one of them; None: it
    is not suspected, since its engine was killed from outside. `avoids`: the engines of the last of
    these groups, until one of them is back: others of them would have been lost by then.
    """

    losses: int
    company: int | None
    avoids: frozenset[int]

    @classmethod
    def of_killed(cls) -> Suspicion:
        """Of a request whose engine was killed from outside: no more than a note that this has
        happened once.
        """
        return cls(1, None, frozenset())

    @property
    def spares_last(self) -> bool:
        """Whether it gets no group without which no engine is left."""
        return self.losses > 1 and self.company is not None

    @property
    def trial(self) -> Trial | None:
        """What decides which groups may have it; None if it is not suspected."""
        return None if self.company is None else (self.spares_last, self.company, self.avoids)

    def without(self, engine: int) -> Suspicion:
        """The same once an engine is back."""
        return replace(self, avoids=frozenset()) if engine in self.avoids else self

    @property
    def is_certain(self) -> bool:
        """Whether its group was lost once more when it might have no other suspect beside it: it is
        tried no more.

        Prompts that had begun there meanwhile do not count: else one that kills engines could have
        new ones beside it each time.
        """
        return self.company == 0


def suspected(before: Suspicion | None, suspects: int, group: frozenset[int]) -> Suspicion:
    """What to think of a request whose group has lost an engine, as one of `suspects` there.

    Half as many may be in a group next time. So a prompt that kills engines is alone after about
    log2(suspects) losses, whatever comes to its groups meanwhile.
    """
    losses = 1 if before is None else before.losses + 1
    if before is None or before.company is None:
        company = max(1, suspects // 2)
    else:
        company = min(before.company, suspects) // 2
    return Suspicion(losses, company, group)
