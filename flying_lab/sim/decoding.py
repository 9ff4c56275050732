"""The requests of a lane that decode. A step costs the same to simulate for any number of them."""

from __future__ import annotations

import heapq
from array import array

from flying_lab.sim.requests import SimRequest

TIMES_KEPT = 4096
"""Steps after which decoding requests take over the times of their tokens."""


class DecodeBatch:
    """Decoding requests advance together by a counter of steps.

    A heap says which of `requests` ends at which count, and a ring how many need a new block at
    which count.

    Args:
        block_tokens: tokens in one KV block of the lane.
        keep_times: whether requests that have a `token_s` get the time of each token.
    """

    def __init__(self, block_tokens: int, keep_times: bool) -> None:
        self.context_tokens = 0
        self._block_tokens = block_tokens
        self.requests: dict[str, SimRequest] = {}
        self._ends: list[tuple[int, int, SimRequest]] = []
        self._new_blocks = [0] * block_tokens
        self._count = 0
        self._order = 0
        self._times: array[float] | None = array("d") if keep_times else None
        self._times_from = 0

    @property
    def last(self) -> SimRequest:
        """Return the request that joined last."""
        return next(reversed(self.requests.values()))

    @property
    def new_blocks(self) -> int:
        """Return the blocks that the next step needs."""
        return self._new_blocks[self._count % self._block_tokens]

    def add(self, request: SimRequest) -> None:
        """A request has its first token of this lane and is to get more."""
        self.requests[request.request_id] = request
        request.joined_at = self._count
        request.ends_at = self._count + request.tokens_here - request.tokens
        self._order += 1
        heapq.heappush(self._ends, (request.ends_at, self._order, request))
        self.context_tokens += request.context_tokens
        self._new_blocks[self._phase(request)] += 1

    def remove(self, request: SimRequest) -> None:
        """Stop decoding a request here."""
        self.sync(request)
        self._new_blocks[self._phase(request)] -= 1
        self.context_tokens -= request.context_tokens
        del self.requests[request.request_id]

    def sync(self, request: SimRequest) -> None:
        """Bring a request's count of tokens, and their times, up to date if it decodes."""
        if request.request_id not in self.requests:
            return
        if self._times is not None and request.token_s is not None:
            request.token_s.extend(self._times[request.joined_at - self._times_from :])
        request.tokens += self._count - request.joined_at
        request.joined_at = self._count

    def advance(self, now_s: float) -> list[SimRequest]:
        """End a step: every request has one token more. Returns the requests that have all of
        theirs and are removed.
        """
        self._count += 1
        self.context_tokens += len(self.requests)
        if self._times is not None:
            self._keep_time(self._times, now_s)
        ended = []
        while self._ends and self._ends[0][0] <= self._count:
            ends_at, _, request = heapq.heappop(self._ends)
            if self.requests.get(request.request_id) is request and request.ends_at == ends_at:
                self.remove(request)
                ended.append(request)
        return ended

    def _keep_time(self, times: array[float], now_s: float) -> None:
        times.append(now_s)
        if len(times) >= TIMES_KEPT:
            for request in self.requests.values():
                self.sync(request)
            del times[:]
            self._times_from = self._count

    def _phase(self, request: SimRequest) -> int:
        """Return the count, modulo a block, at which the request begins a new block (it computes
        its last token then).
        """
        return (self._count - request.context_tokens + 1) % self._block_tokens
