"""A scheduler with the attributes of vLLM's that groups use, over vLLM's own block pool; and a channel in memory."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.metrics.stats import SchedulerStats

from flying_serving.engine.tickets import Ticket

BLOCK = 4


@dataclass
class Request:
    """What is asked of a vLLM request. Its tokens are its name and their places."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0
    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens


@dataclass
class ListPool:
    """What is asked of vLLM's BlockPool, with nothing cached and no state but which blocks are free."""

    num_gpu_blocks: int
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_gpu_blocks))

    @property
    def blocks(self) -> list[Any]:
        """Return a view of each block."""
        return [
            SimpleNamespace(block_id=block, ref_cnt=int(block not in self.free), is_null=block == 0)
            for block in range(self.num_gpu_blocks)
        ]

    @property
    def null_block(self) -> Any:
        """Return the block that stands for none."""
        return self.blocks[0]

    def get_num_free_blocks(self) -> int:
        """Return how many are free."""
        return len(self.free)

    def get_new_blocks(self, count: int) -> list[Any]:
        """Take free blocks, least recently used first."""
        taken, self.free = self.free[:count], self.free[count:]
        assert len(taken) == count
        blocks = self.blocks
        return [blocks[block] for block in taken]

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        """Put blocks back."""
        for block in blocks:
            assert block.ref_cnt, f"block {block.block_id} is free already"
            self.free.append(block.block_id)


@dataclass
class Manager:
    """What is asked of vLLM's KVCacheManager."""

    block_pool: Any
    requests: dict[str, Request]

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        """Return the blocks of a request."""
        return (self.requests[request_id].blocks,)


class FakeScheduler:
    """First come, first served, in chunks; admitted when all tokens fit; the last is preempted when blocks run out."""

    def __init__(self, blocks: int, *, budget: int = 8, max_running: int = 4, pool: Any = None) -> None:
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=BLOCK) if pool is None else pool
        self.requests: dict[str, Request] = {}
        self.kv_cache_manager = Manager(self.pool, self.requests)
        self.block_size, self.max_model_len = BLOCK, 10_000
        self.max_num_scheduled_tokens = budget
        self.max_running = max_running
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.seen: set[str] = set()
        self.constrained: set[str] = set()
        self.bitmask = np.zeros((8, 2), dtype=np.int32)
        self.preempted_now = False
        self.finished: set[str] = set()
        self.outputs: list[Any] = []
        self.done: list[str] = []

    # ---- what groups call

    def has_requests(self) -> bool:
        """Whether there is anything to schedule or to tell the workers."""
        return bool(self.requests or self.finished)

    def get_num_unfinished_requests(self) -> int:
        """Return how many run and wait."""
        return len(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        """Return how many run, and how many wait."""
        return len(self.running), len(self.waiting)

    def make_stats(self) -> SchedulerStats:
        """Return what vLLM's makes of this lane alone."""
        return SchedulerStats(*self.get_request_counts(), kv_cache_usage=self.pool.get_usage())

    def get_grammar_bitmask(self, plan: SchedulerOutput) -> GrammarOutput | None:
        """Return which requests must keep to a grammar, in a buffer that is used again, as vLLM's is."""
        constrained = [name for name in plan.num_scheduled_tokens if name in self.constrained]
        return GrammarOutput(constrained, self.bitmask[: len(constrained)]) if constrained else None

    def schedule(self) -> SchedulerOutput:
        """Let each running request compute what it can, then admit waiting ones."""
        plan = SchedulerOutput.make_empty()
        plan.finished_req_ids, self.finished = self.finished, set()
        plan.new_block_ids_to_zero = []
        left = self._schedule_running(plan, self.max_num_scheduled_tokens)
        if not self.preempted_now:
            self._admit(plan, left)
        self.preempted_now = False
        plan.total_num_scheduled_tokens = sum(plan.num_scheduled_tokens.values())
        return plan

    def _schedule_running(self, plan: SchedulerOutput, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            tokens = min(budget, request.num_tokens - request.num_computed_tokens)
            added = self._grow(request, request.num_computed_tokens + tokens)
            if added is None:
                self._preempt(self.running[-1])
                continue
            self._tell(plan, request, added, tokens)
            budget -= tokens
            index += 1
        return budget

    def _admit(self, plan: SchedulerOutput, budget: int) -> None:
        while self.waiting and budget and len(self.running) < self.max_running:
            request = self.waiting[0]
            if self._grow(request, request.num_tokens) is None:
                break
            self.running.append(self.waiting.pop(0))
            tokens = min(budget, request.num_tokens)
            if request.request_id in self.seen:
                plan.scheduled_cached_reqs.resumed_req_ids.add(request.request_id)
                self._tell(plan, request, list(request.blocks), tokens)
            else:
                self.seen.add(request.request_id)
                blocks = (list(request.blocks),)
                plan.scheduled_new_reqs.append(new_request(request.request_id, request.num_prompt_tokens, blocks))
                plan.num_scheduled_tokens[request.request_id] = tokens
            budget -= tokens

    def _tell(self, plan: SchedulerOutput, request: Request, added: list[int], tokens: int) -> None:
        cached = plan.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append((added,) if added else None)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.num_output_tokens.append(request.num_tokens - request.num_prompt_tokens)
        plan.num_scheduled_tokens[request.request_id] = tokens
        plan.new_block_ids_to_zero += added

    def _preempt(self, request: Request) -> None:
        self.preempted_now = True
        self.running.remove(request)
        self.waiting.insert(0, request)
        self._free(request)
        request.num_computed_tokens = 0

    def _free(self, request: Request) -> None:
        self.pool.free_blocks([self.pool.blocks[b] for b in reversed(request.blocks)])
        request.blocks = []

    def update_from_output(self, plan: SchedulerOutput, output: Any) -> Any:
        """Count what was computed, add a token where a request has caught up, end those that have all."""
        self.outputs.append(output)
        for request_id, tokens in plan.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_computed_tokens += tokens
            if request.num_computed_tokens == request.num_tokens:
                request.num_tokens += 1
                if request.num_tokens - request.num_prompt_tokens == request.max_tokens:
                    self.done.append(request_id)
                    self.end(request_id)
        return {0: ("outputs of", sorted(plan.num_scheduled_tokens))}

    # ---- what tests call

    def add(self, request_id: str, prompt: int, max_tokens: int) -> None:
        """A request arrives."""
        self.requests[request_id] = Request(request_id, prompt, max_tokens)
        self.waiting.append(self.requests[request_id])

    def finish_requests(self, request_ids: Iterable[str], status: Any) -> None:
        """What vLLM's does when requests are aborted."""
        for request_id in request_ids:
            self.end(request_id)

    def end(self, request_id: str) -> None:
        """A request is over, or aborted."""
        request = self.requests.pop(request_id)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        if request_id in self.seen:
            self.finished.add(request_id)
        self._free(request)

    def _grow(self, request: Request, tokens: int) -> list[int] | None:
        count = -(-tokens // BLOCK) - len(request.blocks)
        if count > self.pool.get_num_free_blocks():
            return None
        added = [block.block_id for block in self.pool.get_new_blocks(max(0, count))]
        request.blocks += added
        return added


class EndlessScheduler(FakeScheduler):
    """Has work without end, or none ever, and needs no blocks."""

    def __init__(self, blocks: int, *, pool: Any = None, busy: bool) -> None:
        super().__init__(blocks, pool=pool)
        self.busy = busy

    def has_requests(self) -> bool:
        """Return whether there is work."""
        return self.busy

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests there would be."""
        return int(self.busy)

    def schedule(self) -> SchedulerOutput:
        """Plan a step that says nothing."""
        plan = SchedulerOutput.make_empty()
        plan.total_num_scheduled_tokens = 1
        return plan


def new_request(request_id: str, prompt: int, block_ids: tuple[list[int], ...]) -> NewRequestData:
    """Return what a plan says of a request that is scheduled for the first time."""
    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=list(range(prompt)),
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=block_ids,
        num_computed_tokens=0,
        lora_request=None,
    )


def cached_requests(names: Iterable[str], new_block_ids: Sequence[tuple[list[int], ...] | None]) -> CachedRequestData:
    """Return what a plan says of requests that ran before."""
    cached = CachedRequestData.make_empty()
    cached.req_ids = list(names)
    cached.new_block_ids = list(new_block_ids)
    cached.num_computed_tokens = [7] * len(cached.req_ids)
    cached.num_output_tokens = [1] * len(cached.req_ids)
    return cached


class Memory:
    """What an engine's model runner keeps: tables of blocks, and slot by slot whose token was written there last."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.content: dict[tuple[int, int], tuple[str, int]] = {}
        self.tables: dict[str, list[int]] = {}

    def write(self, plan: SchedulerOutput) -> None:
        """Do what a model runner does with a plan: keep tables, check what was written before, write what is new."""
        done: dict[str, int] = {}
        for gone in plan.finished_req_ids:
            self.tables.pop(gone)
        for new in plan.scheduled_new_reqs:
            self.tables[new.req_id] = list(new.block_ids[0])
            done[new.req_id] = 0
        cached = plan.scheduled_cached_reqs
        for name, added, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self.tables[name] = []
            self.tables[name] += added[0] if added else []
            done[name] = computed
        for name, tokens in plan.num_scheduled_tokens.items():
            for place in range(done[name]):
                assert self.content[self.tables[name][place // BLOCK], place % BLOCK] == (name, place)
            for place in range(done[name], done[name] + tokens):
                block = self.tables[name][place // BLOCK]
                assert 0 < block < self.blocks
                self.content[block, place % BLOCK] = (name, place)


class Inboxes:
    """Tickets of all engines, in the order in which they were sent: `of(engine)` is a Channel's sending half."""

    def __init__(self, engines: int) -> None:
        self.of_engine: list[deque[Ticket]] = [deque() for _ in range(engines)]

    def send(self, members: Sequence[int], ticket: Ticket) -> None:
        """Append to the inboxes of all members at once."""
        for member in members:
            self.of_engine[member].append(ticket)

    def read(self, engine: int) -> Ticket:
        """Return an engine's next ticket."""
        return self.of_engine[engine].popleft()
