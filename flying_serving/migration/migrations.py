"""Requests that go on in another group with their KV, between engines (docs/protocol.md).

The old group's leader *retains* a request: it no longer runs, and its blocks stay. The new group's leader, when the
client has sent it there, sets blocks aside and sends a MigrateKV to the smallest group that holds both. In it the KV is
copied, the old leader releases its blocks, and the new one admits the request. What cannot be copied is prefilled.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from vllm.v1.request import Request

from flying_serving.layout.groups import Group
from flying_serving.memory.kv_view import Run
from flying_serving.migration.hold import Hold
from flying_serving.migration.messages import KVOffer, MigrateKV, decode_offers, encode_offers
from flying_serving.migration.source import Source
from flying_serving.migration.target import Arrival, Target
from flying_serving.migration.transfer import copy_kv, share_offers
from flying_serving.vllm_adapter.blocks import SchedulerPool
from flying_serving.wire import MigrationCounts

RETRY_S = 0.005


class KVLane(Protocol):
    """What migrations need of an engine's lane.

    `pool` is that of its scheduler, if this engine leads the group.
    """

    @property
    def block_tokens(self) -> int: ...
    @property
    def pool(self) -> SchedulerPool | None: ...
    def physical(self, blocks: list[int]) -> list[int]:
        """The engine's own blocks behind blocks of the lane."""


class Migrations:
    """All requests that leave an engine or come to it; `lanes` are its own, by group size.

    `send` sends a message to engines. `call_workers` calls a function of `migration/transfer.py` on this engine's
    workers, and returns what the first returns. `admit` gives a request to the scheduler of the lane of this size.
    `ask_blocks` is told a group size, and how many blocks are missing there.
    """

    def __init__(
        self,
        engine: int,
        lanes: Mapping[int, KVLane],
        send: Callable[[Group, MigrateKV], None],
        call_workers: Callable[..., Any],
        admit: Callable[[Request, int], None],
        ask_blocks: Callable[[int, int], None],
    ) -> None:
        self._engine = engine
        self._lanes = lanes
        self._call_workers = call_workers
        pools = {size: lane.pool for size, lane in lanes.items() if lane.pool is not None}
        self.source = Source(pools)
        self.target = Target(engine, pools, [size for size in lanes if size > 1], send, admit, ask_blocks)
        self.hold = Hold()

    def __bool__(self) -> bool:
        """Whether a request is on its way here."""
        return bool(self.target)

    def counts(self) -> MigrationCounts:
        """What has arrived since the start."""
        return MigrationCounts(self.target.migrated, self.target.migrated_tokens, self.target.prefilled_again)

    def retain(self, request_ids: Iterable[str], now_s: float) -> None:
        """Requests leave for another group, which may fetch their KV."""
        ids = list(request_ids)
        self.target.leave(ids)
        self.source.retain(ids, now_s)

    def expect(self, request: Request, size: int, source: Group, old_id: str, now_s: float) -> None:
        """A request has arrived; its KV is in the group `source`."""
        self.hold.arrival()
        self.target.waiting.append(Arrival(request, size, source, old_id, now_s))

    def begin(self, now_s: float) -> None:
        """Order the copies that can be made; release what was not fetched in time."""
        if self.source.retained:
            self.source.release_overdue(now_s)
        if self.target.waiting and not self.hold.awaits_arrivals(now_s):
            self.target.begin(now_s)

    def retry_in_s(self, now_s: float) -> float | None:
        """Seconds until `begin` has something to do by itself; None if it has not."""
        return RETRY_S if self.target.waiting else self.source.retry_in_s(now_s)

    def serve(self, message: MigrateKV, now_s: float) -> None:
        """Copy the KV, together with all other engines of the message's group."""
        self.hold.message()
        offers = self._share_offers(message, now_s)
        ranges = []
        for one, offer in zip(message.requests, offers, strict=True):
            ranges.append(range(one.start_tokens, max(one.start_tokens, min(offer.tokens, one.tokens))))
        count = sum(map(len, ranges))
        if count:
            old = self._runs(message.source, [offer.blocks for offer in offers], ranges)
            new = self._runs(message.target, [one.blocks for one in message.requests], ranges)
            self._call_workers(copy_kv, message.group, (message.source, old), (message.target, new), count)
        if self._engine == message.source[0]:
            self.source.release(one.request_id for one in message.requests)
        if self._engine == message.target[0]:
            self._admit(message, offers, now_s)

    def _share_offers(self, message: MigrateKV, now_s: float) -> list[KVOffer]:
        """What the source's leader has of each request; every engine of the message's group calls it."""
        leader = message.source[0]
        block_tokens = self._lanes[len(message.source)].block_tokens
        sizes = [-(-one.tokens // block_tokens) for one in message.requests]
        mine = None
        if self._engine == leader:
            mine = encode_offers(self.source.offers(message, sizes, now_s), sizes)
        numbers = self._call_workers(share_offers, message.group, leader, mine, len(sizes) + sum(sizes))
        return decode_offers(numbers, sizes)

    def _runs(self, group: Group, blocks: list[list[int]], ranges: list[range]) -> list[Run] | None:
        """The tokens to copy, in this engine's own blocks; None if it is not in the group."""
        if self._engine not in group:
            return None
        lane = self._lanes[len(group)]
        return [(lane.physical(each), tokens) for each, tokens in zip(blocks, ranges, strict=True) if tokens]

    def _admit(self, message: MigrateKV, offers: list[KVOffer], now_s: float) -> None:
        pairs = zip(message.requests, offers, strict=True)
        arrived = [self.target.arrived(one, min(offer.tokens, one.tokens)) for one, offer in pairs]
        self.retain([arrival.request.request_id for arrival in arrived if arrival.left], now_s)
