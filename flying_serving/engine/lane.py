"""A lane of an engine: its part in the group of one size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flying_serving.comm.board import StepBoard
from flying_serving.engine.channel import Sender
from flying_serving.engine.group import Leader, Member
from flying_serving.layout.groups import Group
from flying_serving.migration.offers import OfferTable
from flying_serving.vllm_adapter.kv.blocks import SchedulerPool

HashBlocks = Callable[[Any], Any]
"""A function that returns the block hashes of a vLLM request."""


@dataclass(frozen=True)
class EngineLane:
    """An engine's part in its group of one size. Its runner is on the workers (`worker/lanes.py`),
    by the same size.

    `hash_blocks`: of requests of this lane; None without prefix caching. `pool`: of the lane's
    scheduler, on the group's leader. `member`: the engine's loans to the group; None in lane 1,
    which owns all blocks. `leader`: set on the leader of a group of several.
    """

    group: Group
    block_tokens: int
    hash_blocks: HashBlocks | None
    pool: SchedulerPool | None
    member: Member | None = None
    leader: Leader | None = None

    def physical(self, blocks: list[int]) -> list[int]:
        """Return the engine's own blocks behind blocks of the lane."""
        return blocks if self.member is None else self.member.lent.translate(blocks)


@dataclass(frozen=True)
class LaneFactory:
    """Makes the lanes of one engine.

    `own_pool`: lane 1's pool, which lends blocks to the groups. `table`: shows peers which blocks.
    `lend_blocks`: how many a leader asks for at a time.
    """

    engine: int
    own_pool: SchedulerPool
    channel: Sender
    table: OfferTable
    lend_blocks: int

    def own_lane(self, block_tokens: int, hash_blocks: HashBlocks | None) -> EngineLane:
        """Make lane 1, over the engine's own pool."""
        return EngineLane((self.engine,), block_tokens, hash_blocks, self.own_pool)

    def group_lane(
        self,
        group: Group,
        block_tokens: int,
        hash_blocks: HashBlocks | None,
        make_pool: Callable[[], SchedulerPool],
    ) -> EngineLane:
        """Make the engine's part in a group of several; `make_pool` is called on the group's
        leader.
        """
        show = partial(self.table.lend, len(group))
        member = Member(group, self.engine, self.own_pool, self.channel, show)
        if group[0] != self.engine:
            return EngineLane(group, block_tokens, hash_blocks, None, member)
        pool = make_pool()
        leader = Leader(group, pool, self.channel, self.lend_blocks)
        return EngineLane(group, block_tokens, hash_blocks, pool, member, leader)


class EngineLanes:
    """The lanes of an engine by group size, lane 1 first, and the parts that only some lanes have.

    `board`: there the leader of a group notes for its members what the group runs.
    """

    def __init__(self, lanes: Sequence[EngineLane], board: StepBoard) -> None:
        self._board = board
        self.by_size = {len(lane.group): lane for lane in lanes}
        self.pools = {
            size: lane.pool for size, lane in self.by_size.items() if lane.pool is not None
        }
        """Pools of the lanes that this engine leads, by group size."""
        self.schedulers = {size: pool.scheduler for size, pool in self.pools.items()}
        """vLLM's schedulers of these lanes, by group size."""
        self.members = {
            size: lane.member for size, lane in self.by_size.items() if lane.member is not None
        }
        """The engine's part in groups of several, by group size."""
        self.leaders = {
            size: lane.leader for size, lane in self.by_size.items() if lane.leader is not None
        }
        """The engine's part as the leader of groups of several, by group size."""
        self.broken: set[int] = set()
        """Sizes of groups that lack a member: `Membership` says so."""

    @property
    def own_pool(self) -> SchedulerPool:
        """Lane 1's pool: the engine's physical blocks."""
        return self.pools[1]

    def active(self) -> int:
        """Return how many lanes have requests that this engine steps."""
        own = sum(bool(scheduler.running) for scheduler in self.schedulers.values())
        return own + sum(
            self._runs(member)
            for size, member in self.members.items()
            if size not in self.schedulers
        )

    def busy(self, below: int) -> list[int]:
        """Return the lanes for groups of fewer than `below` engines, led by this engine, that have
        requests or a step under way.
        """
        stepping = {size for size, leader in self.leaders.items() if leader.is_stepping}
        running = {
            size for size, one in self.schedulers.items() if one.get_num_unfinished_requests()
        }
        return sorted(size for size in stepping | running if size < below)

    def _runs(self, member: Member) -> bool:
        """Return whether requests run in a group that another engine leads; a lost leader cannot
        say that they have left.
        """
        return (
            member.lent.lent_count > 0
            and self._board.requests(member.group[0], len(member.group)) > 0
        )

    def note_loads(self) -> None:
        """Show the members of groups that this engine leads how many requests run, and the blocks
        that they hold.

        Requests leave a group without a step, so no message of the group would say so.
        """
        for size, leader in self.leaders.items():
            self._board.note_requests(leader.group[0], size, len(leader.scheduler.running))
            self._board.note_blocks(leader.group[0], size, leader.borrowed.in_use)

    def check(self) -> None:
        """Raise IntegrityError if the blocks of any lane do not add up."""
        self.own_pool.check(
            set().union(*(member.lent.physical() for member in self.members.values()))
        )
        for leader in self.leaders.values():
            leader.check()
