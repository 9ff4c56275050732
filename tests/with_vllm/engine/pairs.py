"""A group of two engines with their schedulers, whose messages a test serves one by one."""

from typing import Any

from flying_serving.engine.group import Leader, Member, in_physical_blocks
from flying_serving.engine.messages import (
    BlocksReserved,
    LendBlocks,
    RecallBlocks,
    ReserveBlocks,
    ReturnBlocks,
    RunStep,
)
from flying_serving.vllm_adapter.blocks import SchedulerPool
from flying_serving.vllm_adapter.engine_pool import EnginePool
from tests.with_vllm.engine.inboxes import Inboxes
from tests.with_vllm.engine.schedulers import BLOCK, FakeScheduler

GROUP = (0, 1)


def handle(message: Any, member: Member, leader: Leader, now: float) -> int:
    """Do what a message about blocks says, as an engine's loop does; return how many blocks the
    member misses.
    """
    if isinstance(message, ReserveBlocks):
        return member.reserve(message)
    if isinstance(message, LendBlocks):
        member.lent.commit(message.blocks)
    elif isinstance(message, ReturnBlocks):
        member.lent.take_back(message.blocks)
    elif isinstance(message, BlocksReserved):
        leader.take_answer(message, now)
    else:
        assert isinstance(message, RecallBlocks)
        leader.give_back(message.count)
    return 0


class Pair:
    """A group of engines 0 and 1, each with its own scheduler, and the leader's for the group."""

    def __init__(
        self, blocks: int = 13, lend_blocks: int = 2, group_blocks: int | None = None
    ) -> None:
        self.inboxes = Inboxes(2)
        self.own = [FakeScheduler(blocks) for _ in GROUP]
        channel: Any = self.inboxes
        self.pools = [EnginePool(scheduler) for scheduler in self.own]
        self.shown: list[dict[int, int]] = [{} for _ in GROUP]
        self.members = [
            Member(GROUP, engine, pool, channel, self.shown[engine].__setitem__)
            for engine, pool in enumerate(self.pools)
        ]
        self.scheduler = FakeScheduler(group_blocks or blocks)
        self.leader = Leader(GROUP, SchedulerPool(self.scheduler), channel, lend_blocks)

    def kinds(self, engine: int) -> list[str]:
        """Return what waits in an inbox."""
        return [type(message).__name__ for message in self.inboxes.of_engine[engine]]

    def serve(self, engine: int, now: float) -> Any:
        """Let an engine do what its next message says, as its loop does; return a step's plan in
        its own blocks.
        """
        message = self.inboxes.read(engine)
        member = self.members[engine]
        if not isinstance(message, RunStep):
            handle(message, member, self.leader, now)
            return None
        return in_physical_blocks(message.plan, member.lent)

    def serve_all(self, now: float) -> None:
        """Serve what there is, but for steps."""
        while True:
            ready = [e for e in GROUP if self.kinds(e) and self.kinds(e)[0] != "RunStep"]
            if not ready:
                return
            self.serve(ready[0], now)

    def finish_step(self) -> None:
        """Let all members serve a step, which is what comes next."""
        message = self.inboxes.of_engine[0][0]
        assert isinstance(message, RunStep)
        for engine in GROUP:
            self.serve(engine, 0.0)
        self.leader.finish(message.plan, "output")

    def lend(self, count: int) -> None:
        """Let a round of lending take place."""
        self.scheduler.add("first", BLOCK * count - 1, 1)
        self.leader.order(0.0)
        self.serve_all(0.0)
