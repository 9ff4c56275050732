"""Where requests migrate from: the leader of the old group retains their KV until it is fetched."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm.v1.request import RequestStatus

from flying_serving.migration.messages import KVOffer, MigrateKV
from flying_serving.vllm_adapter.blocks import SchedulerPool

RETAIN_S = 5.0
"""How long retained KV is held for the target."""


@dataclass
class Retained:
    """A request that has left its lane: its tokens with KV, and the lane's blocks that hold it."""

    size: int
    tokens: int
    blocks: list[int]
    since_s: float


class Source:
    """The KV of requests that have left lanes which this engine leads; `pools`: of these lanes, by group size."""

    def __init__(self, pools: Mapping[int, SchedulerPool]) -> None:
        self._pools = pools
        self.retained: dict[str, Retained] = {}

    def retain(self, request_ids: Iterable[str], now_s: float) -> None:
        """Take requests out of their schedulers, and keep their KV until it is released."""
        for request_id in request_ids:
            for size, pool in self._pools.items():
                request = pool.scheduler.requests.get(request_id)
                if request is None:
                    continue
                # what a step under way computes may not be there yet
                tokens = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
                if tokens:
                    self.retained[request_id] = Retained(size, tokens, pool.pin(request_id), now_s)
                pool.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def release(self, request_ids: Iterable[str]) -> None:
        """Free the KV of requests, if it is retained."""
        for request_id in request_ids:
            retained = self.retained.pop(request_id, None)
            if retained is not None:
                self._pools[retained.size].unpin(retained.blocks)

    def release_overdue(self, now_s: float) -> None:
        """Free what was not fetched in RETAIN_S, or what running requests would be preempted for."""
        short = {one.size for one in self.retained.values() if self._pools[one.size].missing_for_running()}
        overdue = [i for i, one in self.retained.items() if now_s - one.since_s > RETAIN_S or one.size in short]
        self.release(overdue)

    def retry_in_s(self, now_s: float) -> float | None:
        """Seconds until something is overdue; None if nothing is retained."""
        since_s = min((one.since_s for one in self.retained.values()), default=None)
        return None if since_s is None else max(0.0, since_s + RETAIN_S - now_s)

    def offers(self, message: MigrateKV, sizes_blocks: list[int], now_s: float) -> list[KVOffer]:
        """What is here of each request of a message, in at most the numbers of blocks that are given."""
        self.retain([one.request_id for one in message.requests], now_s)  # if the client's order is on its way
        found = [self.retained.get(one.request_id) for one in message.requests]
        return [
            KVOffer(0, []) if one is None else KVOffer(one.tokens, one.blocks[:size])
            for one, size in zip(found, sizes_blocks, strict=True)
        ]
