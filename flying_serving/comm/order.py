"""One total order for everything that engines do together.

A leader that wants its group to act takes one number per member, all at once, under a lock of the
node. A member acts in the order of its own numbers, in any order of arrival and from any sender.
Two groups that share two members therefore meet in the same order at both, so engines never wait
for each other in a cycle.
"""

import fcntl
from collections.abc import Sequence

from flying_serving.comm.life import hold, is_held
from flying_serving.comm.mapped import MappedArray

_KEPT = 4096
"""Number of each member's latest numbers whose sender is recorded."""
_LIFE_BYTES = 1 << 40
"""First of the bytes, one per engine, that an engine holds locked as long as it lives; behind the
contents of the file.
"""


class SequenceNumbers(MappedArray):
    """Sequence numbers of messages, shared by all engines of a server through one small file.

    The locks belong to the open file, so the kernel releases them when their holder dies.
    """

    def __init__(self, path: str, engines: int) -> None:
        super().__init__(path, engines * (1 + _KEPT), "Q")
        self._engines = engines

    def join(self, engine: int) -> None:
        """Let others see that this process, which is an engine, lives."""
        hold(self.file, _LIFE_BYTES + engine)

    def is_gone(self, engine: int) -> bool:
        """Return whether an engine that has joined does not live any more."""
        return not is_held(self.file, _LIFE_BYTES + engine)

    def take(self, sender: int, members: Sequence[int]) -> list[int]:
        """Take the next number of each member, all in one step: no other leader's numbers fall
        between them.
        """
        fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            numbers = [self.numbers[m] for m in members]
            for member, number in zip(members, numbers, strict=True):
                self.numbers[self._sender_index(member, number)] = sender
                self.numbers[member] = number + 1
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)
        return numbers

    def taken(self, member: int) -> int:
        """Return how many numbers of a member have been taken: their messages are there or on their
        way.
        """
        return self.numbers[member]

    def sender(self, member: int, number: int) -> int:
        """Return the engine that has taken a number, one of the last of a member."""
        return self.numbers[self._sender_index(member, number)]

    def _sender_index(self, member: int, number: int) -> int:
        return self._engines + member * _KEPT + number % _KEPT
