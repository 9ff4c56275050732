"""What an engine of the model has in place of clock, channel, board and report, and how much time
counts there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flying_serving.engine.group import ASK_AGAIN_S
from flying_serving.engine.messages import Message, RunStep
from flying_serving.layout.groups import Group
from flying_serving.scheduling.arbiter import HOLD_S

if TYPE_CHECKING:
    from tests.with_vllm.protocol.engine import Engine

NOW_S = 1024.0
"""What the clock says, always: when time passes, what engines remember moves into the past."""
TICK_S = 0.0625
"""So much time passes at once. After one tick every wait for others is over, after two every pause
is.
"""
PAUSE_S = 2 * TICK_S
assert max(ASK_AGAIN_S, HOLD_S) < TICK_S
TOOK_S = {1: 1 / 1024, 2: 2 / 1024, 4: 2 / 1024}
"""How long steps take, for a weave that shares time."""


def now() -> float:
    """Return the time."""
    return NOW_S


class Entered(Exception):
    """The next thing is a step of a group, which needs the others."""


class Reading(Exception):
    """The next thing is to copy what others have offered: they may go on before that."""


class Inbox:
    """In place of a Channel: keeps what is sent, and gives out the message that is next."""

    def __init__(self) -> None:
        self.sent: list[tuple[Group, Message]] = []
        self.next: Message | None = None

    def send(self, members: Sequence[int], message: Message) -> None:
        """Note what is sent."""
        self.sent.append((tuple(members), message))

    def pending(self) -> bool:
        """Return whether the next message is here."""
        return self.next is not None

    def receive(self) -> Message:
        """Return that message, unless it needs other engines. Raises Entered then."""
        assert self.next is not None
        message, self.next = self.next, None
        if isinstance(message, RunStep):
            raise Entered
        return message


class Board:
    """In place of a StepBoard: steps take as long as they are to, and nobody waits for anybody in
    the meantime.

    A group that another engine leads runs something whenever it has blocks of a member: the member
    then pulls KV in the smallest pieces, between which most can happen.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def ended(self, engine: int, size: int, now_s: float) -> None:
        """A step has taken a tick, where time is exact."""
        if self._engine.settings.exact:
            self._engine.pass_time()

    def together_since(self, engines: Sequence[int], size: int, since: float) -> float:
        """Return when a step that ends now began."""
        return NOW_S - TOOK_S[size]

    def note_sampled(self, engine: int, size: int, step: int, checksum: int) -> None:
        """Note it for others, if tokens may differ."""
        if self._engine.settings.diverging:
            self._engine.samples.noted[size] = (step, checksum)

    def forget_sampled(self, engine: int, size: int) -> None:
        """Note that no step was made, if tokens may differ."""
        self.note_sampled(engine, size, 0, 0)

    def sampled(self, engine: int, size: int) -> list[tuple[int, int]]:
        """Return what a member shows as its leader looks, in both places; before its first step if
        none differs.
        """
        return [self._engine.samples.seen.get(engine, (0, 0))] * 2

    def note_requests(self, leader: int, size: int, requests: int) -> None:
        """Note nothing."""

    def requests(self, leader: int, size: int) -> int:
        """Return that a request runs."""
        return 1

    def note_blocks(self, leader: int, size: int, blocks: int) -> None:
        """Note nothing."""


class Nothing:
    """In place of what only measures and reports."""

    def stats_if_due(self, *args: Any, **options: Any) -> None:
        """Report nothing."""

    def stats_if_changed(self, now_s: float) -> None:
        """Report nothing."""
