"""A lane that does everything the slow and obvious way: lists of requests, each with its own
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Slow:
    """One request: `computed` of its tokens are in the KV cache; it `decodes` once it has a token
    of the lane.
    """

    name: str
    prompt: int
    output: int
    tokens: int = 0
    computed: int = 0
    blocks: int = 0
    decodes: bool = False
    first_s: float = -1.0
    end_s: float = -1.0

    @property
    def context(self) -> int:
        """Prompt and output so far."""
        return self.prompt + self.tokens


class SlowLane:
    """vLLM's scheduling, written down step by step, with one pool."""

    def __init__(self, blocks: int, block_tokens: int, seqs: int, budget: int) -> None:
        self.free = blocks
        self.block_tokens, self.seqs, self.budget = block_tokens, seqs, budget
        self.waiting: list[Slow] = []
        self.running: list[Slow] = []
        self.scheduled: dict[str, tuple[int, int]] = {}

    def add(self, request: Slow) -> None:
        """Those with KV go first."""
        with_kv = sum(one.computed > 0 for one in self.waiting)
        self.waiting.insert(with_kv if request.computed else len(self.waiting), request)

    def begin(self) -> dict[str, tuple[int, int]]:
        """By request: (new tokens, tokens before)."""
        self.scheduled, preempted = {}, False
        arrived = sum(one.computed == one.context - 1 > 0 for one in self.waiting)
        decoding = sum(one.decodes for one in self.running)
        chunk = budget = max(0, self.budget - decoding)
        if arrived:
            chunk = max(
                1, max(1, self.budget - decoding - arrived) // max(1, len(self.running) - decoding)
            )
        for request in list(self.running):
            if request not in self.running or (budget == 0 and not request.decodes):
                continue
            count = 1 if request.decodes else min(budget, chunk, request.context - request.computed)
            while not self._allocate(request, request.computed + count):
                preempted = True
                last = self.running.pop()
                self._preempt(last)
                if last is request:
                    break
            if request in self.running:
                self.scheduled[request.name] = (count, request.computed)
                budget -= 0 if request.decodes else count
        while self.waiting and not preempted and budget > 0 and len(self.running) < self.seqs:
            request = self.waiting[0]
            if self._missing(request, request.context) > self.free:
                break
            count = min(budget, chunk, request.context - request.computed)
            self._allocate(request, request.computed + count)
            self.running.append(self.waiting.pop(0))
            self.scheduled[request.name] = (count, request.computed)
            budget -= count
        return self.scheduled

    def finish(self, now_s: float) -> list[str]:
        """Names of those that ended."""
        ended = []
        for request in list(self.running):
            if request.name not in self.scheduled:
                continue
            request.computed += self.scheduled[request.name][0]
            if request.computed < request.context:
                continue
            request.tokens += 1
            request.decodes = True
            request.first_s = now_s if request.first_s < 0 else request.first_s
            if request.tokens == request.output:
                request.end_s = now_s
                self.free += request.blocks
                request.blocks = 0
                self.running.remove(request)
                ended.append(request.name)
        # one with KV may have come behind prompts
        self.running.sort(key=lambda request: not request.decodes)
        return ended

    def _missing(self, request: Slow, tokens: int) -> int:
        return -(-tokens // self.block_tokens) - request.blocks

    def _allocate(self, request: Slow, tokens: int) -> bool:
        missing = self._missing(request, tokens)
        if missing > self.free:
            return False
        self.free -= missing
        request.blocks += missing
        return True

    def _preempt(self, request: Slow) -> None:
        self.free += request.blocks
        request.blocks = request.computed = 0
        request.decodes = False
        self.waiting.insert(sum(one.computed > 0 for one in self.waiting), request)
