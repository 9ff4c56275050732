"""A group of two engines with their schedulers, whose messages a test serves one by one."""

from collections.abc import Iterable
from typing import Any

from flying_serving.engine.block_lending import BlockLending
from flying_serving.engine.group import Member, in_physical_blocks
from flying_serving.engine.lane import EngineLanes, LaneFactory
from flying_serving.engine.messages import RunStep
from flying_serving.layout.groups import Group
from flying_serving.migration.offers import OfferTable
from flying_serving.migration.source import Source
from flying_serving.vllm_adapter.kv.blocks import SchedulerPool
from flying_serving.vllm_adapter.kv.engine_pool import EnginePool
from tests.with_vllm.engine.inboxes import Inboxes
from tests.with_vllm.engine.schedulers import BLOCK, FakeScheduler

GROUP = (0, 1)


class Part:
    """One engine with the lanes that production makes, over schedulers with as many blocks."""

    def __init__(
        self, engine: int, groups: Iterable[Group], channel: Any, blocks: int, lend_blocks: int = 2
    ) -> None:
        self.own = FakeScheduler(blocks)
        self.pool = EnginePool(self.own)
        size_bytes = OfferTable.size_bytes(1, blocks)
        self.table = OfferTable(memoryview(bytearray(size_bytes)), 1, blocks)
        factory = LaneFactory(engine, self.pool, channel, self.table, lend_blocks)

        def make_pool() -> SchedulerPool:
            return SchedulerPool(FakeScheduler(blocks))

        self._lanes = [factory.own_lane(BLOCK, None)]
        self._lanes += [factory.group_lane(group, BLOCK, None, make_pool) for group in groups]

    def lanes(self, board: Any = None) -> EngineLanes:
        """Return the lanes; without a board nothing may ask what other engines run."""
        return EngineLanes(self._lanes, board)

    def lending_at(self, now_s: float) -> BlockLending:
        """Return what handles messages about blocks at this time; it keeps no blocks of requests
        that have left.
        """
        lanes = self.lanes()
        return BlockLending(lanes, Source(lanes.pools, self.table), lambda: now_s)


class Pair:
    """A group of engines 0 and 1, each with its own scheduler, and the leader's for the group."""

    def __init__(self, blocks: int = 13, lend_blocks: int = 2) -> None:
        self.inboxes = Inboxes(2)
        self.parts = [Part(engine, [GROUP], self.inboxes, blocks, lend_blocks) for engine in GROUP]
        self.leader = self.parts[0].lanes().leaders[2]
        self.scheduler = self.leader.scheduler

    @property
    def own(self) -> list[FakeScheduler]:
        """The engines' own schedulers."""
        return [part.own for part in self.parts]

    @property
    def pools(self) -> list[EnginePool]:
        """Their pools."""
        return [part.pool for part in self.parts]

    @property
    def members(self) -> list[Member]:
        """The engines' parts in the group."""
        return [part.lanes().members[2] for part in self.parts]

    def kinds(self, engine: int) -> list[str]:
        """Return what waits in an inbox."""
        return [type(message).__name__ for message in self.inboxes.of_engine[engine]]

    def serve(self, engine: int, now: float) -> Any:
        """Let an engine do what its next message says, as its loop does; return a step's plan in
        its own blocks.
        """
        message: Any = self.inboxes.read(engine)
        if not isinstance(message, RunStep):
            self.parts[engine].lending_at(now).handle(message)
            return None
        return in_physical_blocks(message.plan, self.members[engine].lent)

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
        self.leader.plan_step(0.0)
        self.serve_all(0.0)
