"""The owner's side: KV of requests that leave an engine, or will, is offered to whoever goes on with them."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.v1.request import RequestStatus

from flying_serving.migration.offers import OfferTable
from flying_serving.vllm_adapter.blocks import SchedulerPool, may_start

RETAIN_S = 5.0
"""How long the KV of requests that have left is kept while nobody pulls any of it, and no request needs its blocks."""
YIELD_S = 0.1
"""How long it is kept from a request that needs its blocks, if a part of it was pulled: the next may be on its way."""


@dataclass
class Running:
    """A request of the lane of `size` whose KV is offered: after every step if `early`, else when it has ended."""

    number: int
    size: int
    early: bool


@dataclass
class Retained:
    """KV of a request that has left its lane, which knew it by this id: the lane's blocks that hold it.

    `freed_blocks`: those before them, which are free by now. `since_s`: when there was last somebody who pulls; None
    until time is looked at.
    """

    request_id: str
    size: int
    blocks: list[int]
    freed_blocks: int = 0
    since_s: float | None = None


class Source:
    """The offers of lanes which this engine leads; `pools`: of these lanes, by group size."""

    def __init__(self, pools: Mapping[int, SchedulerPool], table: OfferTable) -> None:
        self._pools = pools
        self._table = table
        self.running: dict[str, Running] = {}
        self.retained: dict[int, Retained] = {}
        """By number."""
        for size, pool in pools.items():
            pool.before_free(partial(self._freed, size))

    def offer(self, request_id: str, size: int, number: int, *, early: bool) -> None:
        """A request comes to a lane whose KV will be asked for under `number`."""
        self.running[request_id] = Running(number, size, early)
        if early:  # whoever is to pull it knows that it comes
            self._table.publish(number, 0, [], final=False)

    def publish(self) -> None:
        """After a step: say how much there is of requests that are offered while they run."""
        for request_id, one in self.running.items():
            request = self._pools[one.size].scheduler.requests.get(request_id) if one.early else None
            if request is not None:
                tokens = self._pools[one.size].valid_tokens(request)
                if tokens:
                    self._table.publish(one.number, tokens, self._pools[one.size].blocks_of(request_id), final=False)

    def retain(self, request_id: str, number: int) -> None:
        """A request goes on elsewhere: take it out of its scheduler, and offer what it has. It may have nothing."""
        offered = self.running.pop(request_id, None)
        if offered is not None and offered.number != number:
            self._table.revoke(offered.number)
        for size, pool in self._pools.items():
            request = pool.scheduler.requests.get(request_id)
            if request is not None:
                self.keep(number, size, request_id, pool.valid_tokens(request))
                pool.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)
                return
        if number not in self.retained:  # else it has ended by now, and all of it is offered
            self._table.revoke(number)

    def keep(self, number: int, size: int, request_id: str, tokens: int) -> None:
        """Keep the blocks of a request that are there, whatever becomes of it, and offer its first `tokens` tokens."""
        known = self._table.read(number)
        if not tokens or (known is not None and known.is_final):  # who was to have it may be over already
            self._table.revoke(number)
            return
        blocks = self._pools[size].pin(request_id)
        self.retained[number] = Retained(request_id, size, blocks)
        self._table.publish(number, tokens, blocks, final=True)

    def _freed(self, size: int, request: Any) -> None:
        """A scheduler is about to free a request's blocks: it has ended, is aborted, or is preempted."""
        offered = self.running.get(request.request_id)
        if offered is None or offered.size != size:
            return
        del self.running[request.request_id]
        if request.status != RequestStatus.FINISHED_LENGTH_CAPPED:  # all others do not go on, or go on here
            self._table.revoke(offered.number)
        else:
            self.keep(offered.number, size, request.request_id, self._pools[size].valid_tokens(request))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests are over, or leave, that may not have come to a scheduler."""
        for request_id in request_ids:
            offered = self.running.pop(request_id, None)
            if offered is not None:
                self._table.revoke(offered.number)

    def abort(self, request_ids: Collection[str]) -> None:
        """Requests are over, here and elsewhere: nobody will pull what is kept of them either."""
        self.forget(request_ids)
        for number in [number for number, one in self.retained.items() if one.request_id in request_ids]:
            self.release(number)

    def release(self, number: int, tokens: int | None = None) -> None:
        """Nobody wants an offer any more, or nobody shall have it; or the first `tokens` tokens of what is retained."""
        if tokens is not None:
            self._release_first(number, tokens)
            return
        self._table.revoke(number)
        self.running = {name: one for name, one in self.running.items() if one.number != number}
        retained = self.retained.pop(number, None)
        if retained is not None and retained.blocks:
            self._pools[retained.size].unpin(retained.blocks)

    def _release_first(self, number: int, tokens: int) -> None:
        """Free the blocks that only these tokens fill. Whoever has pulled them goes on to what else it is offered."""
        retained = self.retained.get(number)
        if retained is not None:
            pool = self._pools[retained.size]
            count = tokens // pool.scheduler.block_size - retained.freed_blocks
            retained.blocks = pool.unpin(retained.blocks, count)
            retained.freed_blocks += count
            for one in self.retained.values():
                one.since_s = None

    def release_all(self) -> None:
        """Free all that is retained."""
        for number in list(self.retained):
            self.release(number)

    def dissolve(self, size: int) -> None:
        """Nobody may read any KV of the lane of `size` from now on."""
        self._release_lane(size)
        self.forget([name for name, one in self.running.items() if one.size == size])

    def _release_lane(self, size: int) -> None:
        for number in [number for number, one in self.retained.items() if one.size == size]:
            self.release(number)

    def revoke_all(self) -> None:
        """Nobody may read any KV from now on."""
        for one in self.running.values():
            if one.early:
                self._table.revoke(one.number)
        self.running = {name: one for name, one in self.running.items() if not one.early}
        self.release_all()

    def keeps(self, size: int) -> bool:
        """Whether KV of a request is kept that has left the lane of `size`."""
        return any(one.size == size for one in self.retained.values())

    def yield_blocks(self, size: int, now_s: float) -> bool:
        """A request needs blocks of this lane: free those of one that has left it. False if none of them can be freed.

        The last is the first to go whose KV nobody has begun to pull: the others are pulled before it. Who is to pull
        it finds the offer revoked, and prefills. One that is pulled goes when nothing came of that for YIELD_S.
        """
        here = {number: one for number, one in self.retained.items() if one.size == size}
        idle = [number for number, one in here.items() if not one.freed_blocks or self._idle_s(one, now_s) > YIELD_S]
        if idle:
            self.release(min(idle, key=lambda number: (here[number].freed_blocks > 0, -number)))
        return bool(idle)

    def advance(self, now_s: float) -> None:
        """Free what was not pulled in RETAIN_S, what requests of lane 1 need that wait, or that would be preempted for.

        Groups ask their members for blocks first. Time runs from the first call on: KV is kept in the middle of a step,
        which may be a long one.
        """
        for one in self.retained.values():
            one.since_s = now_s if one.since_s is None else one.since_s
        for number in [number for number, one in self.retained.items() if self._idle_s(one, now_s) > RETAIN_S]:
            self.release(number)
        while self._lacks_own_blocks() and self.yield_blocks(1, now_s):
            pass
        for size in {one.size for one in self.retained.values() if self._pools[one.size].missing_for_running()}:
            self._release_lane(size)

    def _lacks_own_blocks(self) -> bool:
        """Whether a request waits in lane 1 for want of blocks, and not because as many run as may.

        What is missing is counted only where something is kept that could yield: the count looks at each request.
        """
        scheduler = self._pools[1].scheduler
        waits = scheduler.waiting or scheduler.kv_holding_waiting
        most = may_start(scheduler)
        return self.keeps(1) and bool(waits) and most > 0 and self._pools[1].missing_for_next(most) > 0

    def retry_in_s(self, now_s: float) -> float | None:
        """Seconds until something is overdue; None if nothing is retained."""
        idle_s = max((self._idle_s(one, now_s) for one in self.retained.values()), default=None)
        return None if idle_s is None else max(0.0, RETAIN_S - idle_s)

    @staticmethod
    def _idle_s(one: Retained, now_s: float) -> float:
        """Seconds since somebody pulled."""
        return 0.0 if one.since_s is None else now_s - one.since_s
