"""One total order for everything that engines do together.

A leader that wants its group to act takes one number per member, all at once, under a lock of the node. A member acts
in the order of its own numbers, in whatever order messages came, and from any sender. Two groups that share two
members therefore meet in the same order at both, so engines never wait for each other in a cycle.
"""

import fcntl
from collections.abc import Sequence

from flying_serving.comm.mapped import MappedArray


class SequenceNumbers(MappedArray):
    """Sequence numbers of messages, shared by all engines of a server through one small file.

    The lock belongs to the open file, so the kernel releases it when its holder dies.
    """

    def __init__(self, path: str, engines: int) -> None:
        super().__init__(path, engines, "Q")

    def take(self, members: Sequence[int]) -> list[int]:
        """The next number of each member, taken in one step: no other leader's numbers fall between them."""
        fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            numbers = [self.numbers[m] for m in members]
            for member, number in zip(members, numbers, strict=True):
                self.numbers[member] = number + 1
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)
        return numbers

    def taken(self, member: int) -> int:
        """How many numbers of a member have been taken: their messages are there or on their way."""
        return self.numbers[member]
