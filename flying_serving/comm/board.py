"""State that engines show each other without a message: when each ended its steps, the tokens that
it sampled, and the load of their groups.
"""

from collections.abc import Iterable

from flying_serving.comm.mapped import MappedArray

STEPS = 1 << 20
"""The number of a step is below this; after the last number comes 0 again."""
_LANES = 4  # group sizes 1, 2, 4, 8
_CHECKSUMS = 1 << 32


class StepBoard(MappedArray):
    """Times of the last steps of a server's engines, requests and blocks of their groups, in a file
    that they map.

    Times are CLOCK_MONOTONIC seconds, which all processes of a node share. An entry has one writer,
    and a double that is written whole is read whole, so there is no lock.
    """

    def __init__(self, path: str, engines: int) -> None:
        super().__init__(path, 5 * engines * _LANES, "d")
        self._blocks_at = engines * _LANES
        self._requests_at = 2 * engines * _LANES
        self._sampled_at = 3 * engines * _LANES

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

    def note_sampled(self, engine: int, size: int, step: int, checksum: int) -> None:
        """Note a checksum (32 bits) of the tokens that an engine has sampled in its group of `size`
        by a step (below STEPS).
        """
        # both in one double, which has 53 bits: they are written together
        self.numbers[self._sampled_entry(engine, size) + step % 2] = step * _CHECKSUMS + checksum

    def forget_sampled(self, engine: int, size: int) -> None:
        """Forget what was noted with `note_sampled`."""
        for step in range(2):
            self.numbers[self._sampled_entry(engine, size) + step] = 0.0

    def sampled(self, engine: int, size: int) -> list[tuple[int, int]]:
        """Return the steps and checksums that an engine has noted with `note_sampled`: those of the
        last even and the last odd step, zeros before.
        """
        first = self._sampled_entry(engine, size)
        return [divmod(int(number), _CHECKSUMS) for number in self.numbers[first : first + 2]]

    def _sampled_entry(self, engine: int, size: int) -> int:
        return self._sampled_at + 2 * _entry(engine, size)

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
