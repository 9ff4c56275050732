"""The ranks of a shared-memory group as each of them sees the others: where they are, and which are
gone.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence

from flying_serving.comm.life import hold, is_held
from flying_serving.comm.shm_kernels import LINE_BYTES
from flying_serving.errors import CollectiveTimeout, GroupBroken

# Words of the header: one of the group (why it was aborted: 0, or 1 + the rank that was lost), two
# of each rank.
WORD_BYTES = 8
REASON = 0
FLAG, PID = 0, 1


class GroupRanks:
    """The header of a group's open file, `words` of int64. `names`: of all ranks, for errors."""

    def __init__(
        self, file: int, words: memoryview, rank: int, names: Sequence[str], deadline_s: float
    ) -> None:
        self._file = file
        self.words = words
        self._rank = rank
        self._names = names
        self.deadline_s = deadline_s

    @staticmethod
    def attach(file: int, rank: int) -> bool:
        """Take a rank's place, with the file locked; False if it was taken before.

        The system drops this lock when the process ends, in any way: so the others see it
        (`_left`).
        """
        place = WORD_BYTES * word(rank, PID)
        if any(os.pread(file, WORD_BYTES, place)):
            return False
        hold(file, rank)
        os.pwrite(file, os.getpid().to_bytes(WORD_BYTES, sys.byteorder), place)
        return True

    def check(self, operation: str, sequence: int, ranks: range, waited_s: float) -> None:
        """Raise if there is no use in waiting any longer for `ranks` in operation `sequence`."""
        reason = self.words[REASON]
        if reason:
            raise GroupBroken(
                f"{operation}: the group was aborted because of {self._names[reason - 1]}"
            )
        # The kernel waits for all to have begun the operation before, then for `ranks` to be where
        # this rank is.
        own = self.words[word(self._rank, FLAG)]
        awaited, needed = (
            (ranks, own) if own >= sequence else (range(len(self._names)), sequence - 1)
        )
        # In this order: a rank may publish and leave, and has then left nothing undone.
        left = [rank for rank in awaited if rank != self._rank and self._left(rank)]
        behind = {rank: at for rank in awaited if (at := self.words[word(rank, FLAG)]) < needed}
        lost = [rank for rank in left if rank in behind]
        if not lost and (not behind or waited_s < self.deadline_s):
            return
        self.abort(min(lost or behind))
        if lost:
            raise GroupBroken(f"{operation}: exited or closed: {self._describe(lost)}")
        raise CollectiveTimeout(
            f"{operation}: waited {waited_s:.1f} s for {self._describe(behind)}"
        )

    def _left(self, rank: int) -> bool:
        """Return whether a rank was attached and is no longer."""
        # read before the lock, which is taken before this is set
        if not self.words[word(rank, PID)]:
            return False
        return not is_held(self._file, rank)

    def _describe(self, ranks: Iterable[int]) -> str:
        """Return the names, processes and sequence numbers of some ranks."""
        return ", ".join(
            f"{self._names[rank]} (process {pid}, at sequence {self.words[word(rank, FLAG)]})"
            if (pid := self.words[word(rank, PID)])
            else f"{self._names[rank]} (not attached)"
            for rank in ranks
        )

    def abort(self, reason_rank: int) -> None:
        """End the group for all its ranks, because of a rank. Any thread may call it at any time;
        the first reason stays.
        """
        with contextlib.suppress(ValueError):  # closed
            self.words[REASON] = self.words[REASON] or 1 + reason_rank


def word(rank: int, field: int) -> int:
    """Return the place of a rank's field among the words of the header."""
    return (1 + rank) * LINE_BYTES // WORD_BYTES + field
