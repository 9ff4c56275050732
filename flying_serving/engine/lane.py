"""A lane of an engine: what it has for the groups of one size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flying_serving.engine.group import Leader, Member
from flying_serving.layout.groups import Group
from flying_serving.vllm_adapter.blocks import SchedulerPool

HashBlocks = Callable[[Any], Any]
"""Block hashes of a vLLM request."""


@dataclass(frozen=True)
class Lane:
    """An engine's part in its group of one size. Its runner is on the workers (`worker/lanes.py`), by the same size.

    `hash_blocks`: of requests of this lane; None without prefix caching. `pool`: of the lane's scheduler, on the
    group's leader. `member`: what the engine lends to the group; None in lane 1, which owns all blocks. `leader`: what
    only the leader of a group of several has.
    """

    group: Group
    block_tokens: int
    hash_blocks: HashBlocks | None
    pool: SchedulerPool | None
    member: Member | None = None
    leader: Leader | None = None

    def physical(self, blocks: list[int]) -> list[int]:
        """The engine's own blocks behind blocks of the lane."""
        return blocks if self.member is None else self.member.lent.translate(blocks)


class Lanes:
    """The lanes of an engine, lane 1 first: all of them by group size, and those that have certain parts."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.by_size = {len(lane.group): lane for lane in lanes}
        self.schedulers = {size: lane.pool.scheduler for size, lane in self.by_size.items() if lane.pool is not None}
        """vLLM's, of the groups that this engine leads."""
        self.members = {size: lane.member for size, lane in self.by_size.items() if lane.member is not None}
        """The engine's part in groups of several."""
        self.leaders = {size: lane.leader for size, lane in self.by_size.items() if lane.leader is not None}
        """What it has as the leader of groups of several."""

    @property
    def own(self) -> SchedulerPool:
        """Lane 1's pool: the engine's physical blocks."""
        pool = self.by_size[1].pool
        assert pool is not None
        return pool

    def active(self) -> int:
        """How many lanes have requests that this engine steps."""
        sizes = {size for size, scheduler in self.schedulers.items() if scheduler.running}
        return len(sizes | {size for size, member in self.members.items() if member.in_use})

    def check(self) -> None:
        """Raise IntegrityError if the blocks of any lane do not add up."""
        self.own.check(set().union(*(member.lent.physical() for member in self.members.values())))
        for leader in self.leaders.values():
            leader.check()
