"""State that engines show each other without a message: when each ended its steps, and the load of
their groups.
"""

from collections.abc import Iterable

from flying_serving.comm.mapped import MappedArray

_LANES = 4  # group sizes 1, 2, 4, 8


class StepBoard(MappedArray):
    """Times of the last steps of a server's engines, requests and blocks of their groups, in a file
    that they map.

    Times are CLOCK_MONOTONIC seconds, which all processes of a node share. An entry has one writer,
    and a double that is written whole is read whole, so there is no lock.
    """

    def __init__(self, path: str, engines: int) -> None:
        super().__init__(path, 3 * engines * _LANES, "d")
        self._blocks_at = engines * _LANES
        self._requests_at = 2 * engines * _LANES

    def ended(self, engine: int, size: int, now_s: float) -> None:
        """Note that a step of the lane for groups of `size` has ended on an engine."""
        self.numbers[_entry(engine, size)] = now_s

    def together_since(self, engines: Iterable[int], size: int, since: float) -> float:
        """Return when the last of `engines` ended a step in another lane than that of `size`; at
        the earliest `since`.
        """
        own = size.bit_length() - 1
        ends = (
            self.numbers[engine * _LANES + lane]
            for engine in engines
            for lane in range(_LANES)
            if lane != own
        )
        return max(since, *ends)

    def note_blocks(self, leader: int, size: int, blocks: int) -> None:
        """Note how many blocks of each member the requests of a group of `size` hold, as its leader
        knows.
        """
        self.numbers[self._blocks_at + _entry(leader, size)] = blocks

    def blocks(self, leader: int, size: int) -> int:
        """Return how many blocks the leader last noted with `note_blocks`; 0 before."""
        return int(self.numbers[self._blocks_at + _entry(leader, size)])

    def note_requests(self, leader: int, size: int, requests: int) -> None:
        """Note how many requests run in a group of `size`."""
        self.numbers[self._requests_at + _entry(leader, size)] = requests

    def requests(self, leader: int, size: int) -> int:
        """Return how many requests the leader last noted with `note_requests`; 0 before."""
        return int(self.numbers[self._requests_at + _entry(leader, size)])


def _entry(engine: int, size: int) -> int:
    """Return the index of an engine's entry for groups of `size`."""
    return engine * _LANES + size.bit_length() - 1
