"""Lending of blocks between the lanes of an engine: it asks for blocks, lends them and has them
back.
"""

from collections.abc import Callable

from flying_serving.engine.lane import EngineLanes
from flying_serving.engine.messages import (
    BlocksReserved,
    LendBlocks,
    RecallBlocks,
    ReserveBlocks,
    ReturnBlocks,
)
from flying_serving.migration.source import Source
from flying_serving.vllm_adapter.kv.blocks import may_start

RECALL_WAIT_S = 0.1
"""Seconds that lane 1 waits for blocks that it has lent, rather than preempt a request.

A group may hold them only for KV that has been pulled: the message that releases it is on its way,
or comes after a step of the leader.
"""
LendingMessage = ReserveBlocks | LendBlocks | ReturnBlocks | BlocksReserved | RecallBlocks


class BlockLending:
    """The blocks of one engine in all its lanes.

    `source`: keeps blocks of requests that have left a lane. It frees some of these when the lane
    has no block for a request that needs one.
    """

    def __init__(
        self,
        lanes: EngineLanes,
        source: Source,
        clock: Callable[[], float],
    ) -> None:
        self._lanes = lanes
        self._source = source
        self._clock = clock
        self._short_since_s: float | None = None
        """When lane 1 first lacked lent blocks for its running requests, by `clock`."""

    def handle(self, message: LendingMessage) -> None:
        """Carry out a message of a group's leader, or to a leader."""
        size = len(message.group)
        match message:
            case ReserveBlocks():
                self._reserve(size, message)
            case LendBlocks(_, blocks):
                self._lanes.members[size].lent.commit(blocks)
            case ReturnBlocks(_, blocks):
                self._lanes.members[size].lent.take_back(blocks)
            case BlocksReserved():
                if self._lanes.leaders[size].take_answer(message, self._clock()):
                    self._source.yield_blocks(size, self._clock())
            case RecallBlocks(_, _, count):
                self._give_back(size, count)

    def _reserve(self, size: int, ask: ReserveBlocks) -> None:
        member = self._lanes.members[size]
        if not member.spare(ask):
            self._source.yield_blocks(1, self._clock())
        self._recall(member.reserve(ask), but=size)

    def _give_back(self, size: int, count: int) -> None:
        leader = self._lanes.leaders[size]
        if not leader.unused():
            self._source.yield_blocks(size, self._clock())
        leader.give_back(count)

    def recall_if_short(self) -> bool:
        """Ask for blocks that lane 1 has lent, if it has too few; call this before it steps.

        Returns True if it is not to step now: the step would preempt a request, and blocks may come
        back in RECALL_WAIT_S.
        """
        own, is_short = self._lanes.own_pool, False
        if any(member.lent.lent_count for member in self._lanes.members.values()):
            waiting = own.scheduler.waiting or own.scheduler.kv_holding_waiting
            if waiting or own.free_count() < len(own.scheduler.running):
                self._recall(own.missing_for_next(), but=1)
            is_short = bool(own.scheduler.running) and own.is_short()
        if not is_short:
            self._short_since_s = None
            return False
        now_s = self._clock()
        if self._short_since_s is None:
            self._short_since_s = now_s
        return now_s - self._short_since_s < RECALL_WAIT_S

    def ask(self, size: int, missing: int) -> None:
        """Ask for blocks that the lane of this size lacks for KV that is to arrive."""
        if size == 1:
            self._recall(missing, but=1)
        elif self._lanes.leaders[size].borrowed.room():
            self._lanes.leaders[size].ask_ahead(missing, self._clock())
        else:
            self._source.yield_blocks(size, self._clock())

    def yield_if_all_are_lent(self, size: int) -> None:
        """Free kept blocks if a group's requests may lack blocks and the members have lent all that
        the group can have.

        Call this before the group steps. Missing blocks are counted only where the lane keeps
        blocks that it could free: the count looks at each request.
        """
        leader = self._lanes.leaders[size]
        if leader.borrowed.room() or not self._source.retains_any(size):
            return
        if leader.pool.missing_for_next(may_start(leader.scheduler)):
            self._source.yield_blocks(size, self._clock())

    def _recall(self, missing: int, *, but: int) -> None:
        """Recall blocks from other lanes for the lane of groups of size `but`, which lacks them."""
        if not missing:
            return
        for size, member in self._lanes.members.items():
            if size != but:
                member.recall(missing, self._clock())
