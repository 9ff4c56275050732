"""What is on its way to an engine from others, in the order of its places."""

from __future__ import annotations

from collections.abc import Sequence

from flying_serving.engine.messages import (
    BeginAnew,
    BlocksReserved,
    LendBlocks,
    Message,
    RunStep,
)
from flying_serving.layout.groups import Group
from tests.with_vllm.protocol.faults import Fault

GONE = -1
"""In place of the state of an engine that has stopped, and of a message that has gone with its
sender.
"""

Entry = tuple[int, int]
"""In an inbox: (sender, message)."""


def sort_reserved(
    inbox: tuple[Entry, ...], first: int, messages: Sequence[Message]
) -> tuple[Entry, ...]:
    """Return an inbox with the answers at its end that blocks are reserved, from place `first` on,
    by sender, if they answer one question.

    Which of them comes first makes no difference.
    """
    place = len(inbox)
    while (
        place > first
        and _question(inbox[place - 1], messages) == _question(inbox[-1], messages) is not None
    ):
        place -= 1
    return inbox[:place] + tuple(sorted(inbox[place:]))


def _question(entry: Entry, messages: Sequence[Message]) -> Group | None:
    """Which group has asked for the blocks that a message says are reserved; None if it says
    nothing of that.
    """
    message = None if entry[1] == GONE else messages[entry[1]]
    return message.group if isinstance(message, BlocksReserved) else None


def arrives(fault: Fault | None, sender: int, who: int, message: Message) -> int:
    """Return how often a message arrives: once, if nothing is broken."""
    if fault is Fault.RESERVED_DROPPED and isinstance(message, BlocksReserved) and sender == 1:
        return 0
    if fault is Fault.LEND_DROPPED and isinstance(message, LendBlocks) and who == 1:
        return 0
    if fault is Fault.ANEW_DROPPED and isinstance(message, BeginAnew) and who == 1:
        return 0
    if (
        fault is Fault.STEP_TWICE
        and isinstance(message, RunStep)
        and who == 1
        and len(message.group) == 2
    ):
        return 2
    return 1
