"""Requests that may be why an engine was lost, and with how many others of them one is tried again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suspicion:
    """What the losses of a request's groups say of it, since its last token.

    `losses`: engines that its groups have lost while they may have computed its prompt, together counted as one.
    `company`: how many suspects a group may have while it is one of them; None: it is not suspected, since its engine
    was killed from outside. `avoids`: the engines of the last of these groups. `since_s`: when that was lost.
    """

    losses: int
    company: int | None
    avoids: frozenset[int]
    since_s: float

    @classmethod
    def of_killed(cls, now_s: float) -> Suspicion:
        """Of a request whose engine was killed from outside: no more than a note that this has happened once."""
        return cls(1, None, frozenset(), now_s)

    @property
    def is_certain(self) -> bool:
        """Whether it was the only suspect when its group was lost once more: it is tried no more."""
        return self.company == 0


def suspected(before: Suspicion | None, suspects: int, group: frozenset[int], now_s: float) -> Suspicion:
    """What to think of a request whose group has lost an engine, as one of `suspects` there.

    Half as many may be in a group next time. So a prompt that kills engines is alone after about log2(suspects) losses,
    whatever comes to its groups meanwhile.
    """
    losses = 1 if before is None else before.losses + 1
    if before is None or before.company is None:
        company = max(1, suspects // 2)
    else:
        company = min(before.company, suspects) // 2
    return Suspicion(losses, company, group, now_s)
