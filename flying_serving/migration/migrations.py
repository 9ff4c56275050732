"""Both sides of an engine's migrations: the owner's and the target's."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from flying_serving.migration.host import MigrationHost
from flying_serving.migration.incoming_requests import IncomingRequests
from flying_serving.migration.messages import KVPulled, PullKV, ReleaseKV
from flying_serving.migration.offers import Offers
from flying_serving.migration.source import Source
from flying_serving.migration.target import Target
from flying_serving.migration.transfer import pull_kv
from flying_serving.vllm_adapter.kv.blocks import SchedulerPool

OFFER_POLL_S = 0.005
"""Seconds between two looks of a target for more offered KV."""


class EngineLaneKV(Protocol):
    """What migrations need of an `EngineLane`. `pool`: of its scheduler, on the leader."""

    @property
    def pool(self) -> SchedulerPool | None: ...
    def physical(self, blocks: list[int]) -> list[int]:
        """Return the engine's own blocks behind blocks of the lane."""


class Migrations:
    """All requests that leave an engine or arrive in it.

    `lanes`: the engine's, by group size. `source`: shows its KV to peers. `offers`: show it the KV
    of all engines.
    """

    def __init__(
        self,
        engine: int,
        lanes: Mapping[int, EngineLaneKV],
        source: Source,
        offers: Offers,
        host: MigrationHost,
    ) -> None:
        self._engine = engine
        self._lanes = lanes
        self._offers = offers
        self._host = host
        self.observers: list[Callable[[PullKV], AbstractContextManager[None]]] = []
        """Context managers that are entered while this engine pulls."""
        pools = {size: lane.pool for size, lane in lanes.items() if lane.pool is not None}
        self.source = source
        self.incoming = IncomingRequests(pools, source, host)
        self.target = Target(engine, pools, offers, self.incoming, host, self.pull_part)

    # ---- calls of the engine

    def retain(self, request_id: str, number: int) -> None:
        """Let a request leave for another group, which may pull its KV under this number."""
        if self.incoming.forward(request_id, number):
            self.source.revoke_running([request_id])
        else:
            self.source.retain(request_id, number)

    def abort(self, request_ids: list[str]) -> None:
        """End requests, on both sides."""
        self.incoming.abort(request_ids)
        self.source.abort(request_ids)

    def advance(self, now_s: float, limit_s: float | None) -> None:
        """Free KV that is overdue or needed, and pull for about `limit_s`; call this between two
        steps.

        With None it pulls all that is offered.
        """
        if self.source.retained:
            self.source.advance(now_s)
        if self.incoming:
            self.target.advance(now_s, limit_s)

    def retry_in_s(self, now_s: float) -> float | None:
        """Return the seconds until `advance` has something to do by itself; None if it has nothing
        to do.
        """
        if self.incoming:
            return 0.0 if self.target.has_more else OFFER_POLL_S
        return self.source.retry_in_s(now_s)

    def handle(self, message: PullKV | KVPulled | ReleaseKV) -> None:
        """Carry out a message of another engine, or of this one's leader."""
        match message:
            case PullKV(group, request_id):
                self.pull_part(message)
                self._host.send(group[:1], KVPulled(group, self._engine, request_id))
            case KVPulled():
                self.target.member_pulled(message)
            case ReleaseKV():
                self.source.release(message.number, message.tokens)

    def is_pulling(self) -> bool:
        """Return whether members are about to write into blocks."""
        return any(arrival.writers for arrival in self.incoming.by_id.values())

    def forget_kv(self) -> None:
        """Release retained KV and discard pulled KV. Only while no member pulls."""
        self.source.release_all()
        self.incoming.forget_kv()

    def dissolve(self, size: int) -> None:
        """End all migrations of the lane of `size`, whose group lost a member: no request leaves it
        or arrives.
        """
        self.source.dissolve(size)
        self.incoming.dissolve(size)

    # ---- the copy

    def pull_part(self, message: PullKV) -> None:
        """Copy this engine's part of a pull: the heads of its devices. `Target` calls it in lane 1,
        and `handle` in each member of a group.

        It copies again if the blocks of the source have moved.

        A member moves its own blocks (`weights/lending/engine_weights.py`), and cannot revoke its
        leader's offers. Nothing is copied from a group that has lost an engine: its offers are
        void, so the leader does not count the pull.
        """
        if not self._offers.is_present(message.source.group):
            return
        blocks = self._lanes[len(message.group)].physical(message.blocks)
        with ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer(message))
            copied_from: dict[int, list[int]] = {}
            source_blocks = self._source_blocks(message)
            while copied_from != source_blocks:
                copied_from = source_blocks
                self._host.call_workers(
                    pull_kv,
                    copied_from,
                    message.group,
                    blocks,
                    message.tokens,
                    message.completes,
                )
                source_blocks = self._source_blocks(message)

    def _source_blocks(self, message: PullKV) -> dict[int, list[int]]:
        """Return the own blocks of each engine of the source behind those of the group."""
        source, blocks = message.source.group, message.source_blocks
        return {engine: self._offers.physical(engine, len(source), blocks) for engine in source}
