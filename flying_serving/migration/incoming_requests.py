"""All requests that arrive in lanes of an engine: their beginning and their end.

`target.py` pulls their KV in between.
"""

from collections.abc import Iterable, Mapping

from flying_serving.migration.arrival import Arrival, ArrivalPhase
from flying_serving.migration.host import MigrationHost
from flying_serving.migration.messages import ReleaseKV
from flying_serving.migration.source import Source
from flying_serving.vllm_adapter.kv.blocks import SchedulerPool
from flying_serving.wire import MigrationCounts


class IncomingRequests:
    """Requests that arrive in lanes which this engine leads.

    `pools`: of these lanes, by group size. `source`: keeps the KV of requests that are forwarded.
    """

    def __init__(
        self, pools: Mapping[int, SchedulerPool], source: Source, host: MigrationHost
    ) -> None:
        self._pools = pools
        self._source = source
        self._host = host
        self.by_id: dict[str, Arrival] = {}
        """Requests that have not ended, or whose blocks members still write."""
        self._migrated = 0
        self._migrated_tokens = 0
        self._prefilled_again = 0

    def __bool__(self) -> bool:
        """Return whether any request arrives."""
        return bool(self.by_id)

    def counts(self) -> MigrationCounts:
        """Return the counts of admitted requests since the start."""
        return MigrationCounts(self._migrated, self._migrated_tokens, self._prefilled_again)

    # ---- calls of the API server

    def expect(self, arrival: Arrival) -> None:
        """Take in a request that arrives. A prefetched request keeps the KV that is pulled."""
        prefetch = self.by_id.setdefault(arrival.request_id, arrival)
        if prefetch is not arrival:
            prefetch.run_here(arrival.request, arrival.last_progress_s)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests, which have ended elsewhere too."""
        for request_id in request_ids:
            arrival = self.by_id.get(request_id)
            if arrival is not None and arrival.phase is not ArrivalPhase.ABORTED:
                self._end(arrival, ArrivalPhase.ABORTED)

    def forward(self, request_id: str, number: int) -> bool:
        """End a request here that continues elsewhere before it is admitted. Return False if it
        does not arrive here.
        """
        arrival = self.by_id.get(request_id)
        if arrival is None:
            return False
        if arrival.phase is not ArrivalPhase.ABORTED:
            arrival.forwarded_as = number
            self._end(arrival, ArrivalPhase.FORWARDED)
        return True

    def dissolve(self, size: int) -> None:
        """End all arrivals in the lane of a group that has lost a member: no member answers any
        more.
        """
        arriving = [arrival for arrival in self.by_id.values() if arrival.size == size]
        for arrival in arriving:
            arrival.writers.clear()
            if arrival.phase is not ArrivalPhase.ABORTED:
                arrival.enter(ArrivalPhase.ABORTED)
            self.free(arrival)

    def forget_kv(self) -> None:
        """Discard pulled KV: requests that are to run here are admitted without it."""
        for arrival in list(self.by_id.values()):
            arrival.pulled_tokens = 0
            self.give_up(arrival)

    # ---- the ends of arrivals

    def admit(self, arrival: Arrival, tokens: int) -> None:
        """End an arrival: its scheduler gets the request, with KV of the first `tokens` tokens."""
        pool, request = self._pools[arrival.size], arrival.request
        arrival.enter(ArrivalPhase.ADMITTED)
        tokens = min(tokens, self._usable_tokens(arrival))
        if tokens > arrival.cached_tokens:
            pool.arrived(request, tokens)
            self._migrated += 1
            self._migrated_tokens += tokens - arrival.cached_tokens
        else:
            pool.release(request)
            if arrival.cached_tokens < request.num_tokens - 1:
                self._prefilled_again += 1
        self._forget(arrival)
        self._host.enqueue(request, arrival.size)

    def _usable_tokens(self, arrival: Arrival) -> int:
        """Return how many of the tokens whose KV is here can be used: none if the cache has
        forgotten their prefix, which members may have computed differently.
        """
        pool = self._pools[arrival.size]
        if arrival.cached_tokens and arrival.forgotten != pool.forgotten:
            return 0
        return pool.groups.usable_tokens(arrival.pulled_tokens, arrival.source_tokens)

    def give_up(self, arrival: Arrival) -> None:
        """Admit a request with the KV that is here, as no more comes; drop a prefetch."""
        if arrival.runs_here:
            self.admit(arrival, arrival.pulled_tokens)
        else:  # it may be pulled at once when the request itself arrives
            self._end(arrival, ArrivalPhase.DROPPED)

    def _end(self, arrival: Arrival, phase: ArrivalPhase) -> None:
        """End a request that does not run here. Its blocks are freed when no member writes into
        them.
        """
        arrival.enter(phase)
        if not arrival.writers:
            self.free(arrival)

    def free(self, arrival: Arrival) -> None:
        """Free the blocks of a request that has ended, or keep them for the next target."""
        if arrival.phase is ArrivalPhase.FORWARDED:
            assert arrival.forwarded_as is not None
            # cached tokens alone are not offered: a step under way may yet compute them
            usable = self._usable_tokens(arrival)
            self._source.pin_and_offer(
                arrival.forwarded_as,
                arrival.size,
                arrival.request_id,
                usable if usable > arrival.cached_tokens else 0,
            )
        self._forget(arrival)
        self._pools[arrival.size].release(arrival.request)

    def _forget(self, arrival: Arrival) -> None:
        """Forget an arrival. Its owner may free the KV, but not that of a prefetch: a third group
        may pull it.
        """
        del self.by_id[arrival.request_id]
        if arrival.runs_here:
            self.release(arrival)

    def release(self, arrival: Arrival, tokens: int | None = None) -> None:
        """Tell the owner that it may free the KV of a request, or of its first tokens."""
        owner = arrival.source.group[:1]
        self._host.send(owner, ReleaseKV(owner, arrival.source.number, tokens))
