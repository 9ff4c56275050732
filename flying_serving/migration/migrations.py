"""Requests that go on in another group with their KV, between engines (docs/protocol.md).

The leader of the group that has the KV offers it (`source.py`, `offers.py`). The leader of the group where the request
goes on sets blocks aside and pulls it (`target.py`, `transfer.py`), then admits the request. What cannot be pulled is
prefilled.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

from vllm.v1.request import Request

from flying_serving.layout.groups import Group
from flying_serving.migration.messages import KVPulled, PullKV, ReleaseKV
from flying_serving.migration.offers import Offers, OfferTable
from flying_serving.migration.source import Source
from flying_serving.migration.target import Target
from flying_serving.migration.transfer import pull_kv
from flying_serving.vllm_adapter.blocks import SchedulerPool
from flying_serving.wire import MigrationCounts

RETRY_S = 0.005
"""How often it is looked for what has been published."""


class KVLane(Protocol):
    """What migrations need of an engine's lane; `pool` is that of its scheduler, if this engine leads the group."""

    @property
    def pool(self) -> SchedulerPool | None: ...
    def physical(self, blocks: list[int]) -> list[int]:
        """The engine's own blocks behind blocks of the lane."""


class Migrations:
    """All requests that leave an engine or come to it; `lanes` are its own, by group size.

    `table` and `offers`: what this engine shows, and what it sees of all. `send` sends a message to engines.
    `call_workers` calls a function of `transfer.py` on this engine's workers. `admit` and `ask_blocks`: as in `Target`.
    """

    def __init__(
        self,
        engine: int,
        lanes: Mapping[int, KVLane],
        table: OfferTable,
        offers: Offers,
        send: Callable[[Group, Any], None],
        call_workers: Callable[..., Any],
        admit: Callable[[Request, int], None],
        ask_blocks: Callable[[int, int], None],
    ) -> None:
        self._engine = engine
        self._lanes = lanes
        self._offers = offers
        self._send = send
        self._call_workers = call_workers
        self.observers: list[Callable[[PullKV], AbstractContextManager[None]]] = []
        """Each is entered while this engine pulls."""
        pools = {size: lane.pool for size, lane in lanes.items() if lane.pool is not None}
        self.source = Source(pools, table)
        self.target = Target(engine, pools, offers, send, self.pull, admit, self.source.keep, ask_blocks)

    def __bool__(self) -> bool:
        """Whether a request is on its way here."""
        return bool(self.target.arrivals)

    def counts(self) -> MigrationCounts:
        """What has arrived since the start."""
        return MigrationCounts(self.target.migrated, self.target.migrated_tokens, self.target.prefilled_again)

    def retain(self, request_id: str, number: int) -> None:
        """A request leaves for another group, which may pull its KV under this number."""
        if self.target.leave(request_id, number):
            self.source.forget([request_id])
        else:
            self.source.retain(request_id, number)

    def abort(self, request_ids: list[str]) -> None:
        """Requests are over."""
        self.target.abort(request_ids)
        self.source.abort(request_ids)

    def is_pulling(self) -> bool:
        """Whether members are about to write into blocks."""
        return any(arrival.pulling for arrival in self.target.arrivals.values())

    def forget_kv(self) -> None:
        """Let all KV go: what is retained, and what was pulled. Only while nobody is pulling."""
        self.source.release_all()
        self.target.forget_kv()

    def dissolve(self, size: int) -> None:
        """A member of the group of `size` engines is lost: no request leaves that lane any more, or comes to it."""
        self.source.dissolve(size)
        arriving = [arrival for arrival in self.target.arrivals.values() if arrival.size == size]
        for arrival in arriving:
            arrival.pulling.clear()  # what members are yet to hear of, they drop
        self.target.abort([arrival.request_id for arrival in arriving])

    def advance(self, now_s: float, limit_s: float | None) -> None:
        """Between two steps: pull for about `limit_s`, None: all there is; free KV not pulled in time, or needed."""
        if self.source.retained:
            self.source.advance(now_s)
        if self.target.arrivals:
            self.target.advance(now_s, limit_s)

    def retry_in_s(self, now_s: float) -> float | None:
        """Seconds until `advance` has something to do by itself; None if it has not."""
        if self.target.arrivals:
            return 0.0 if self.target.goes_on else RETRY_S
        return self.source.retry_in_s(now_s)

    def handle(self, message: PullKV | KVPulled | ReleaseKV) -> None:
        """Do what a message says."""
        match message:
            case PullKV(group, request_id):
                self.pull(message)
                self._send(group[:1], KVPulled(group, self._engine, request_id))
            case KVPulled():
                self.target.pulled(message)
            case ReleaseKV():
                self.source.release(message.number, message.tokens)

    def pull(self, message: PullKV) -> None:
        """Copy the heads of this engine's devices, once more if blocks have moved meanwhile (`engine/residency.py`).

        A member moves its own, and cannot revoke what its leader offers. Of a group that has lost an engine nothing is
        copied: its offers are void, so the leader does not count what was pulled.
        """
        if not self._offers.is_mapped(message.source.group):
            return
        mine = self._lanes[len(message.group)].physical(message.blocks)
        with ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer(message))
            theirs: dict[int, list[int]] = {}
            now = self._places(message)
            while theirs != now:
                theirs = now
                self._call_workers(pull_kv, message.source.group, theirs, message.group, mine, message.tokens)
                now = self._places(message)

    def _places(self, message: PullKV) -> dict[int, list[int]]:
        """By engine of the source: its own blocks behind those of the group."""
        source = message.source.group
        return {engine: self._offers.physical(engine, len(source), message.source_blocks) for engine in source}
