"""The owner's side: it offers the KV of requests that leave an engine, or will leave it.

An offer is of a request that runs (`Source.offer`, `publish`) or has left (`retain`,
`pin_and_offer`). It ends when its target has the KV (`release`) or when its blocks are needed
(`yield_blocks`). It also ends when no target pulls (`advance`), or when the request is aborted or
preempted.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import RequestStatus

from flying_serving.migration.offers import OfferTable
from flying_serving.vllm_adapter.kv.blocks import SchedulerPool, may_start

RETAIN_S = 5.0
"""Seconds that retained KV is kept while no target pulls any, and no request needs its blocks."""
YIELD_S = 0.1
"""Seconds that KV of which a part was pulled is kept from a request that needs its blocks."""


@dataclass
class RunningOffer:
    """An offer of a request that runs, in the lane of `size`.

    `early`: it is made after every step, and otherwise when the request has ended.
    """

    number: int
    size: int
    early: bool


@dataclass
class Retained:
    """KV of a request that has left its lane, where it had this id: the blocks that hold it.

    `freed_blocks`: the number of blocks before them, which are free by now. `idle_since_s`: when a
    target last pulled; None until the next `Source.advance`, which sets it.
    """

    request_id: str
    size: int
    blocks: list[int]
    freed_blocks: int = 0
    idle_since_s: float | None = None


class Source:
    """The offers of lanes which this engine leads; `pools`: of these lanes, by group size."""

    def __init__(self, pools: Mapping[int, SchedulerPool], table: OfferTable) -> None:
        self._pools = pools
        self._table = table
        self.running: dict[str, RunningOffer] = {}
        self.retained: dict[int, Retained] = {}
        """Retained KV by the number of its offer."""

    def offer(self, request_id: str, offer: RunningOffer) -> None:
        """Expect a request whose KV will be asked for under the number of this offer."""
        self.running[request_id] = offer
        if offer.early:  # its target waits for the first tokens, and not for the offer
            self._table.publish(offer.number, 0, [], final=False)

    def publish(self) -> None:
        """Publish, for requests that are offered early, how many tokens have KV; call this after a
        step.
        """
        for request_id, offer in self.running.items():
            pool = self._pools[offer.size]
            request = pool.scheduler.requests.get(request_id)
            if not offer.early or request is None or not pool.groups.may_offer(runs=True):
                continue
            tokens = pool.valid_tokens(request)
            if tokens:
                self._table.publish(
                    offer.number,
                    tokens,
                    pool.blocks_of(request_id),
                    final=False,
                    hit_tokens=pool.hit_tokens(request_id),
                )

    def retain(self, request_id: str, number: int) -> None:
        """Take a request that continues elsewhere out of its scheduler, and offer its KV, if
        any.
        """
        offered = self.running.pop(request_id, None)
        if offered is not None and offered.number != number:
            self._table.revoke(offered.number)
        for size, pool in self._pools.items():
            request = pool.scheduler.requests.get(request_id)
            if request is not None:
                self.pin_and_offer(number, size, request_id, pool.valid_tokens(request))
                pool.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
                return
        if number not in self.retained:  # otherwise it has ended by now, and all of it is offered
            self._table.revoke(number)

    def pin_and_offer(self, number: int, size: int, request_id: str, tokens: int) -> None:
        """Keep a request's blocks, even if the request ends, and offer its first `tokens`
        tokens.
        """
        earlier = self._table.read(number)
        # after a final offer its target does not wait any more
        if not tokens or (earlier is not None and earlier.is_final):
            self._table.revoke(number)
            return
        pool = self._pools[size]
        blocks, hit_tokens = pool.pin(request_id), pool.hit_tokens(request_id)
        self.retained[number] = Retained(request_id, size, blocks)
        self._table.publish(number, tokens, blocks, final=True, hit_tokens=hit_tokens)

    def blocks_freed(self, size: int, request: Any) -> None:
        """Offer or revoke KV of a request whose blocks the lane of `size` frees now: it has ended,
        or is preempted.
        """
        offered = self.running.get(request.request_id)
        if offered is None or offered.size != size:
            return
        del self.running[request.request_id]
        # with another status the request has ended for good, or continues here
        if request.status != RequestStatus.FINISHED_LENGTH_CAPPED:
            self._table.revoke(offered.number)
        else:
            tokens = self._pools[size].valid_tokens(request)
            self.pin_and_offer(offered.number, size, request.request_id, tokens)

    def revoke_running(self, request_ids: Iterable[str]) -> None:
        """Revoke offers, made as they run, of requests that have ended or leave.

        Perhaps no scheduler has had them.
        """
        for request_id in request_ids:
            offered = self.running.pop(request_id, None)
            if offered is not None:
                self._table.revoke(offered.number)

    def abort(self, request_ids: Collection[str]) -> None:
        """Revoke all offers of requests that have ended, here and elsewhere: no target pulls their
        retained KV either.
        """
        self.revoke_running(request_ids)
        for number, retained in list(self.retained.items()):
            if retained.request_id in request_ids:
                self.release(number)

    def release(self, number: int, tokens: int | None = None) -> None:
        """Revoke an offer and free its retained blocks; with `tokens`, free only the blocks of the
        first tokens.
        """
        if tokens is not None:
            self._release_first(number, tokens)
            return
        self._table.revoke(number)
        running = self.running.items()
        self.running = {name: offer for name, offer in running if offer.number != number}
        retained = self.retained.pop(number, None)
        if retained is not None and retained.blocks:
            self._pools[retained.size].unpin(retained.blocks)

    def _release_first(self, number: int, tokens: int) -> None:
        """Free the blocks that only these tokens fill. A target pulled: no offer is idle."""
        retained = self.retained.get(number)
        if retained is not None:
            pool = self._pools[retained.size]
            rows = tokens // pool.groups.block_tokens
            count = rows * pool.groups.row_blocks - retained.freed_blocks
            retained.blocks = pool.unpin(retained.blocks, count)
            retained.freed_blocks += count
            for offer in self.retained.values():
                offer.idle_since_s = None

    def release_all(self) -> None:
        """Free all retained KV."""
        for number in list(self.retained):
            self.release(number)

    def dissolve(self, size: int) -> None:
        """Revoke all offers of the lane of `size`: no engine may read any KV of it from now on."""
        self._release_lane(size)
        self.revoke_running([name for name, offer in self.running.items() if offer.size == size])

    def _release_lane(self, size: int) -> None:
        for number, retained in list(self.retained.items()):
            if retained.size == size:
                self.release(number)

    def revoke_all(self) -> None:
        """Revoke all offers that were made: no engine may read any KV from now on."""
        for offer in self.running.values():
            if offer.early:
                self._table.revoke(offer.number)
        self.running = {name: offer for name, offer in self.running.items() if not offer.early}
        self.release_all()

    def retains_any(self, size: int) -> bool:
        """Return whether KV of a request that has left the lane of `size` is retained."""
        return any(retained.size == size for retained in self.retained.values())

    def yield_blocks(self, size: int, now_s: float) -> bool:
        """Free the blocks of one offer, as a request needs blocks of this lane. Return False if
        none can yield.

        Offers of which no part was pulled yield first, the latest of them before the others: it is
        pulled last. An offer of which a part was pulled yields when no more was pulled for YIELD_S.
        Its target finds the offer revoked, and the rest is prefilled.
        """
        untouched: list[int] = []
        stalled: list[int] = []
        for number, retained in self.retained.items():
            if retained.size != size:
                continue
            if not retained.freed_blocks:
                untouched.append(number)
            elif self._idle_s(retained, now_s) > YIELD_S:
                stalled.append(number)
        yielding = untouched or stalled
        if yielding:
            self.release(max(yielding))
        return bool(yielding)

    def advance(self, now_s: float) -> None:
        """Free retained KV that is overdue, or whose blocks requests of this engine need.

        Requests that wait in a group ask its members for blocks first (`engine/block_lending.py`).
        """
        # time runs from the first call on: KV is retained in the middle of a step, maybe a long one
        for retained in self.retained.values():
            if retained.idle_since_s is None:
                retained.idle_since_s = now_s

        # no target pulled it in time
        for number, retained in list(self.retained.items()):
            if self._idle_s(retained, now_s) > RETAIN_S:
                self.release(number)

        # requests wait in lane 1
        while self._lacks_own_blocks() and self.yield_blocks(1, now_s):
            pass

        # requests would be preempted
        for size in {retained.size for retained in self.retained.values()}:
            if self._pools[size].missing_for_running():
                self._release_lane(size)

    def _lacks_own_blocks(self) -> bool:
        """Return whether a request waits in lane 1 for blocks, and not because `max_num_seqs` run.

        The missing blocks are counted last, as the count looks at each request.
        """
        scheduler = self._pools[1].scheduler
        waits = scheduler.waiting or scheduler.kv_holding_waiting
        most = may_start(scheduler)
        if not self.retains_any(1) or not waits or most == 0:
            return False
        return self._pools[1].missing_for_next(most) > 0

    def retry_in_s(self, now_s: float) -> float | None:
        """Return the seconds until something is overdue; None if nothing is retained."""
        retained = self.retained.values()
        idle_s = max((self._idle_s(offer, now_s) for offer in retained), default=None)
        return None if idle_s is None else max(0.0, RETAIN_S - idle_s)

    @staticmethod
    def _idle_s(retained: Retained, now_s: float) -> float:
        """Return the seconds since a target last pulled."""
        return 0.0 if retained.idle_since_s is None else now_s - retained.idle_since_s
