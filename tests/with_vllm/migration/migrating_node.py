"""Two engines with real Migrations over vLLM's own schedulers: messages and KV memory around them
are made up.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from vllm.v1.request import Request, RequestStatus

from flying_serving.layout.groups import Group, KVSource
from flying_serving.migration.arrival import Arrival
from flying_serving.migration.host import MigrationHost
from flying_serving.migration.migrations import Migrations
from flying_serving.migration.offers import Offer, OfferTable
from flying_serving.migration.source import Source
from flying_serving.migration.transfer import pull_kv
from tests.with_vllm.engine.inboxes import Inboxes
from tests.with_vllm.engine.schedulers import Hooks
from tests.with_vllm.vllm_adapter.kv_lanes import BLOCK, KVLane

GROUPS: list[Group] = [(0,), (1,), (0, 1)]


class NodeHost:
    """What migrations of one engine of a node have around them; `groups`: those that it leads, by
    size.
    """

    def __init__(self, node: "MigratingNode", engine: int, groups: Mapping[int, Group]) -> None:
        self._node = node
        self._engine = engine
        self._groups = groups

    def call_workers(
        self, function: Any, source_blocks: Mapping[int, Any], target: Group, *rest: Any
    ) -> None:
        """Copy a member's share."""
        assert function is pull_kv
        blocks, tokens, _ = rest
        source = tuple(source_blocks), source_blocks
        self._node._copy(self._engine, source, (target, blocks), tokens)

    def enqueue(self, request: Request, size: int) -> None:
        """To the scheduler of a lane."""
        self._node.lanes[self._groups[size]].scheduler.add_request(request)

    def ask_blocks(self, size: int, missing: int) -> None:
        """Note what is missing."""
        self._node.asked.append((size, missing))


class MigratingNode:
    """Two engines, their lanes and that of both together, each over a KV memory of its own;
    messages on their way.
    """

    def __init__(
        self, blocks: Mapping[Group, int], *, overlaps: bool, chunk_blocks: int = 64
    ) -> None:
        self.now_s = 0.0
        self._channel = Inboxes(2)
        self.inboxes = self._channel.of_engine
        self.ended: set[str] = set()
        self.lost: set[int] = set()
        self.asked: list[tuple[int, ...]] = []
        self.lanes = {group: KVLane(overlaps=overlaps, blocks=blocks[group]) for group in GROUPS}
        size_bytes = OfferTable.size_bytes(20, 40)
        self.tables = [OfferTable(memoryview(bytearray(size_bytes)), 20, 40) for _ in range(2)]
        self.migrations = [
            self._migrations(0, {1: (0,), 2: (0, 1)}),
            self._migrations(1, {1: (1,)}),
        ]
        for each in self.migrations:
            each.target.chunks.blocks = chunk_blocks
        for group, lane in self.lanes.items():
            lane.scheduler.hooks = Hooks(blocks_freed=partial(self._freed, lane, group))

    def _migrations(self, engine: int, groups: dict[int, Group]) -> Migrations:
        pools = {size: self.lanes[group].pool for size, group in groups.items()}
        lanes: Any = {size: SimpleNamespace(pool=pools.get(size), physical=list) for size in (1, 2)}
        source = Source(pools, self.tables[engine])
        around = NodeHost(self, engine, groups)
        host = MigrationHost(
            self._channel.send, around.call_workers, around.enqueue, around.ask_blocks
        )
        return Migrations(engine, lanes, source, self, host)

    # ---- what migrations see of other engines

    def read(self, source: KVSource) -> Offer | None:
        """An offer, at its group's leader."""
        return self.tables[source.group[0]].read(source.number)

    def physical(self, engine: int, size: int, blocks: Sequence[int]) -> list[int]:
        """Each lane has its own memory here."""
        assert engine not in self.lost, "its table is not mapped"
        return list(blocks)

    def is_present(self, group: Group) -> bool:
        """Unless an engine of it is lost."""
        return self.lost.isdisjoint(group)

    def _copy(
        self, engine: int, source: tuple[Group, Any], target: tuple[Group, list[int]], tokens: range
    ) -> None:
        """A member of a group copies its share of the tokens, in whole blocks."""
        (old, theirs), (new, mine) = source, target
        stop = min(-(-tokens.stop // BLOCK), len(theirs[old[0]])) * BLOCK
        for place in range(tokens.start // BLOCK * BLOCK, stop):
            if place % len(new) == engine % len(new):
                at, to = (
                    BLOCK * blocks[place // BLOCK] + place % BLOCK
                    for blocks in (theirs[old[0]], mine)
                )
                self.lanes[new].kv[to] = self.lanes[old].kv[at]

    def _freed(self, lane: KVLane, group: Group, request: Request) -> None:
        if request.is_finished() and request.status != RequestStatus.FINISHED_ABORTED:
            family = request.prompt_token_ids[0] // 100
            # one that was preempted may end by a step that was under way then: it has no blocks
            blocks = lane.pool.blocks_of(request.request_id)
            assert lane.has(family, blocks, range(request.num_tokens - 1 if blocks else 0))
            self.ended.add(request.request_id)
        self.at(group).source.blocks_freed(len(group), request)

    # ---- what engines do

    def at(self, group: Group) -> Migrations:
        """Those of a group's leader."""
        return self.migrations[group[0]]

    def step(self, group: Group) -> None:
        """A lane's scheduler makes a step."""
        self.lanes[group].step()
        self.at(group).source.publish()

    def serve(self, engine: int) -> None:
        """An engine's oldest message."""
        if self.inboxes[engine]:
            self.migrations[engine].handle(self._channel.read(engine))

    def expect(
        self, request: Request, group: Group, source: KVSource, prefetch_tokens: int | None = None
    ) -> None:
        """A request arrives with its KV, or its KV is prefetched."""
        arrival = Arrival(request, len(group), source, self.now_s, prefetch_tokens)
        self.at(group).incoming.expect(arrival)

    def abort(self, name: str, group: Group) -> None:
        """The client ends a request."""
        self.lanes[group].abort(name)
        self.at(group).abort([name])
