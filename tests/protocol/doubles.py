"""What an engine of the model has in place of clock, channel, board and report, and how much time counts there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flying_serving.engine.arbiter import EXPECT_S
from flying_serving.engine.group import ASK_AGAIN_S
from flying_serving.engine.tickets import Ticket
from flying_serving.layout.groups import Group

NOW_S = 1024.0
"""What the clock says, always: when time passes, what engines remember moves into the past."""
TICK_S = 0.0625
"""So much time passes at once. After one tick every wait for others is over, after two every pause is."""
PAUSE_S = 2 * TICK_S
assert max(ASK_AGAIN_S, EXPECT_S) < TICK_S
TOOK_S = {1: 1 / 1024, 2: 2 / 1024, 4: 2 / 1024}
"""How long steps take, for a weave that shares time."""


class Clock:
    """In place of the module `time`."""

    @staticmethod
    def monotonic() -> float:
        """Return the time."""
        return NOW_S

    @staticmethod
    def thread_time() -> float:
        """Return nothing that matters."""
        return 0.0


class Outbox:
    """In place of a Channel: keeps what is sent, and gives out the ticket that is next."""

    def __init__(self) -> None:
        self.sent: list[tuple[Group, Ticket]] = []
        self.next: Ticket | None = None

    def send(self, members: Sequence[int], ticket: Ticket) -> None:
        """Note what is sent."""
        self.sent.append((tuple(members), ticket))

    def pending(self) -> bool:
        """Return whether the next ticket is here."""
        return self.next is not None

    def receive(self) -> Ticket:
        """Return that ticket."""
        assert self.next is not None
        ticket, self.next = self.next, None
        return ticket


class Board:
    """In place of a StepBoard: steps take as long as they are to, and nobody waits for anybody in the meantime."""

    def ended(self, engine: int, size: int, now: float) -> None:
        """Note nothing."""

    def together_since(self, engines: Sequence[int], size: int, since: float) -> float:
        """Return when a step that ends now began."""
        return NOW_S - TOOK_S[size]


class Nothing:
    """In place of what only measures and reports."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a method that does nothing."""
        if name.startswith("__"):
            raise AttributeError(name)
        return self._do_nothing

    def _do_nothing(self, *args: Any, **options: Any) -> None:
        pass
