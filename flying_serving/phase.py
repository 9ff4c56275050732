"""The phases of a thing: a switch, an engine, an arriving request."""

from collections.abc import Collection, Mapping
from enum import Enum
from typing import Self


class Phase(Enum):
    """A phase; its value is what an error calls it."""

    def then(self, phase: Self, following: Mapping[Self, Collection[Self]], who: str) -> Self:
        """Return the next phase of `who`.

        `following`: the phases that may follow each phase. Raises RuntimeError if this one is none
        of them.
        """
        if phase not in following[self]:
            raise RuntimeError(f"{who}: from {self.value} to {phase.value}")
        return phase
