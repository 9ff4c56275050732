"""A lane in the simulator: continuous batching with chunked prefill and block-accurate KV, as vLLM schedules.

A step costs the same to simulate however many requests decode in it: they advance together by a counter, a heap says
who ends at which count, and a ring says how many need a new block at which count.

As in vLLM 0.32's `Scheduler.schedule`: running requests first, in the order of their admission, so decodes before
prompts that are not done; one that lacks blocks preempts the last running one, perhaps itself, which is computed again
later; then waiting ones if nobody was preempted, each only if its whole prompt has room. Who came with KV takes the
blocks for it then.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Sequence

from flying_serving.layout.groups import Group
from flying_serving.sim.requests import BlockPool, SimRequest, SimStep

TIMES_KEPT = 4096
"""Steps after which decoding requests take over the times of their tokens."""


class SimLane:
    """The requests of one group; `requests` is how many there are.

    Args:
        group: the engines.
        pools: their block pools.
        block_tokens: tokens in one block of this lane.
        slots: requests at a time.
        budget_tokens: tokens in a step at most, no fewer than slots.
        keep_times: whether requests that have a `token_s` get the time of each token.
    """

    def __init__(
        self,
        group: Group,
        pools: Sequence[BlockPool],
        block_tokens: int,
        slots: int,
        budget_tokens: int,
        keep_times: bool = False,
    ) -> None:
        self.group = group
        self.size = len(group)
        self._pools = pools
        self._block_tokens = block_tokens
        self._slots = slots
        self._budget_tokens = budget_tokens
        self.requests = 0
        self.waiting: deque[SimRequest] = deque()
        self._prefilling: dict[str, SimRequest] = {}
        self._decoding: dict[str, SimRequest] = {}
        self._ends: list[tuple[int, int, SimRequest]] = []
        self._crossing = [0] * block_tokens
        self._count = 0
        self._order = 0
        self._context_tokens = 0
        self._times: array[float] | None = array("d") if keep_times else None
        self._times_from = 0
        self.plan: SimStep | None = None

    def add(self, request: SimRequest) -> None:
        """A request comes, perhaps with tokens that it got elsewhere: those that are not computed are prefilled.

        Who has computed tokens goes before those that wait.
        """
        request.lane = self
        request.target_tokens = request.context_tokens
        if request.computed_tokens:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)
        self.requests += 1

    def remove(self, request: SimRequest) -> None:
        """A request leaves before its end; its KV may go on elsewhere."""
        decoded = request.request_id in self._decoding
        self._stop(request)
        if decoded:
            request.computed_tokens = request.context_tokens - 1
        elif self.plan is not None:  # live, the group's leader hears of it when the step under way is over
            in_step = sum(count for one, count in self.plan.prefill if one is request)
            request.computed_tokens = min(request.computed_tokens + in_step, request.target_tokens - 1)
        self._let_go(request)

    def preempt_all(self) -> None:
        """Requests that run lose their KV and are computed again, in the same order."""
        for running in (self._prefilling, self._decoding):
            while running:
                self._preempt(next(reversed(running.values())))

    def sync(self, request: SimRequest) -> None:
        """Bring a decoding request's count of tokens, and their times, up to date."""
        if request.request_id not in self._decoding:
            return
        if self._times is not None and request.token_s is not None:
            request.token_s.extend(self._times[request.joined_at - self._times_from :])
        request.tokens += self._count - request.joined_at
        request.joined_at = self._count

    def running(self) -> list[SimRequest]:
        """Those that decode."""
        return list(self._decoding.values())

    def begin(self) -> SimStep | None:
        """Choose what the next step does and take the blocks for it; None if nothing can run."""
        admits = not self._make_room()
        sequences, context = len(self._decoding), self._context_tokens
        self._take(self._crossing[self._count % self._block_tokens])
        budget = self._budget_tokens - sequences
        prefill: list[tuple[SimRequest, int]] = []
        for request in list(self._prefilling.values()):
            if budget == 0 or request.request_id not in self._prefilling:
                break
            budget, preempted = self._go_on(request, budget, prefill)
            admits = admits and not preempted
        if admits and self.waiting:
            self._admit(budget, prefill)
        if not prefill and not sequences:
            return None
        chunks = [(count, request.computed_tokens) for request, count in prefill]
        self.plan = SimStep(prefill, chunks, sum(count for _, count in prefill), sequences, context)
        return self.plan

    def finish(self, now_s: float) -> tuple[list[SimRequest], list[SimRequest]]:
        """The step is over. Returns who got a first token of this lane, and who has ended."""
        plan = self.plan
        assert plan is not None
        self.plan = None
        self._count += 1
        self._context_tokens += len(self._decoding)
        if self._times is not None:
            self._keep_time(now_s)
        ended = self._end(now_s)
        first = []
        for request, count in plan.prefill:
            if self._prefilling.get(request.request_id) is not request:
                continue  # it was taken back meanwhile
            request.computed_tokens += count
            if request.computed_tokens == request.target_tokens:
                self._first_token(request, now_s)
                first.append(request)
                if request.lane is None:
                    ended.append(request)
        return first, ended

    def _first_token(self, request: SimRequest, now_s: float) -> None:
        """A prompt is done: the request has a token, and goes on if it is to have more."""
        del self._prefilling[request.request_id]
        request.tokens += 1
        if request.token_s is not None:
            request.token_s.append(now_s)
        if request.first_token_s < 0:
            request.first_token_s = now_s
        if request.tokens < request.output_tokens:
            self._join(request)
            return
        request.end_s = now_s
        self._give_back(request)
        self._let_go(request)

    def _keep_time(self, now_s: float) -> None:
        assert self._times is not None
        self._times.append(now_s)
        if len(self._times) >= TIMES_KEPT:
            for request in self._decoding.values():
                self.sync(request)
            del self._times[:]
            self._times_from = self._count

    def _end(self, now_s: float) -> list[SimRequest]:
        ended = []
        while self._ends and self._ends[0][0] <= self._count:
            ends_at, _, request = heapq.heappop(self._ends)
            if self._decoding.get(request.request_id) is not request or request.ends_at != ends_at:
                continue
            self._stop(request)
            request.end_s = now_s
            self._let_go(request)
            ended.append(request)
        return ended

    def _go_on(self, request: SimRequest, budget: int, prefill: list[tuple[SimRequest, int]]) -> tuple[int, bool]:
        """The next chunk of a prompt; who lacks blocks preempts the last running one. What is left, and if one was."""
        count = min(budget, request.target_tokens - request.computed_tokens)
        needed = self._blocks(request.computed_tokens + count) - request.blocks
        preempted = False
        while needed > self._free():
            last = next(reversed(self._prefilling.values()))
            self._preempt(last)
            preempted = True
            if last is request:
                return budget, True
        self._take_for(request, needed)
        prefill.append((request, count))
        return budget - count, preempted

    def _admit(self, budget: int, prefill: list[tuple[SimRequest, int]]) -> None:
        """Waiting requests begin, in order, as long as there are tokens, slots and room for the whole prompt."""
        while self.waiting and budget > 0 and len(self._prefilling) + len(self._decoding) < self._slots:
            request = self.waiting[0]
            if self._blocks(request.target_tokens) > self._free():
                return
            self.waiting.popleft()
            self._prefilling[request.request_id] = request
            count = min(budget, request.target_tokens - request.computed_tokens)
            self._take_for(request, self._blocks(request.computed_tokens + count))
            prefill.append((request, count))
            budget -= count

    def _join(self, request: SimRequest) -> None:
        self._decoding[request.request_id] = request
        request.joined_at = self._count
        request.ends_at = self._count + request.output_tokens - request.tokens
        self._order += 1
        heapq.heappush(self._ends, (request.ends_at, self._order, request))
        self._context_tokens += request.context_tokens
        self._crossing[self._phase(request)] += 1

    def _phase(self, request: SimRequest) -> int:
        """At which counts, modulo a block, the request begins a new block (it computes its last token then)."""
        return (self._count - request.context_tokens + 1) % self._block_tokens

    def _stop(self, request: SimRequest) -> None:
        """A request does not run or wait here any more; its blocks are free."""
        if request.request_id in self._decoding:
            self.sync(request)
            self._crossing[self._phase(request)] -= 1
            self._context_tokens -= request.context_tokens
            del self._decoding[request.request_id]
            # a step under way has taken the block of the token that it computes
            request.blocks = self._blocks(request.context_tokens - (self.plan is None))
        elif self._prefilling.pop(request.request_id, None) is None:
            self.waiting.remove(request)
        self._give_back(request)

    def _let_go(self, request: SimRequest) -> None:
        request.lane = None
        self.requests -= 1

    def _preempt(self, request: SimRequest) -> None:
        self._stop(request)
        request.preemptions += 1
        request.computed_tokens, request.target_tokens = 0, request.context_tokens
        self.waiting.appendleft(request)

    def _make_room(self) -> bool:
        """If the next step's decodes lack blocks, the last running requests are preempted; whether any was."""
        preempted = False
        while self._crossing[self._count % self._block_tokens] > self._free():
            running = self._prefilling or self._decoding
            self._preempt(next(reversed(running.values())))
            preempted = True
        return preempted

    def _blocks(self, tokens: int) -> int:
        """The number of blocks that hold a number of tokens."""
        return -(-tokens // self._block_tokens)

    def _free(self) -> int:
        if self.size == 1:
            return self._pools[0].free
        return min(pool.free for pool in self._pools)

    def _take(self, blocks: int) -> None:
        for pool in self._pools:
            pool.free -= blocks

    def _take_for(self, request: SimRequest, blocks: int) -> None:
        self._take(blocks)
        request.blocks += blocks

    def _give_back(self, request: SimRequest) -> None:
        self._take(-request.blocks)
        request.blocks = 0
