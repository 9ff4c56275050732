"""A scheduler with the attributes of vLLM's that groups use, over vLLM's own block pool."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import RequestStatus

from flying_serving.vllm_adapter.scheduler.scheduler import LaneHooks

BLOCK = 4


@dataclass
class Request:
    """What is asked of a vLLM request. Its tokens are its name and their places."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    num_computed_tokens: int = 0
    """With those of a step that is under way."""
    num_in_flight_tokens: int = 0
    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    status: RequestStatus = RequestStatus.WAITING
    sampling_params: Any = None
    client_index: int = 0
    num_output_placeholders: ClassVar[int] = 0
    """There is one step at a time."""
    spec_token_ids: ClassVar[tuple[int, ...]] = ()
    """There is no speculation."""
    prefill_stats: ClassVar[None] = None
    """Nothing counts its prompt."""

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        """Tokens, and drafts behind them."""
        return self.num_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens beyond the prompt."""
        return self.num_tokens - self.num_prompt_tokens

    def is_finished(self) -> bool:
        """Return whether it has ended."""
        return RequestStatus.is_finished(self.status)

    @property
    def computed(self) -> int:
        """Tokens of steps that are over; a plan begins with the next, as there is one step at a
        time.
        """
        return self.num_computed_tokens - self.num_in_flight_tokens


@dataclass
class Manager:
    """What is asked of vLLM's KVCacheManager, with nothing cached."""

    block_pool: Any
    requests: dict[str, Request]
    ahead: dict[str, Request] = field(default_factory=dict)
    """Requests that have blocks before the scheduler has them."""

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        """Return the blocks of a request."""
        request = self.requests.get(request_id) or self.ahead.get(request_id)
        return ([] if request is None else request.blocks,)

    def get_blocks(self, request_id: str) -> Any:
        """Return the same as vLLM's KVCacheBlocks has it, by group of layers."""
        return SimpleNamespace(blocks=self.get_block_ids(request_id))

    def get_computed_blocks(self, request: Request) -> tuple[list[Any], int, int]:
        """Return what the prefix cache has: nothing."""
        return [], 0, 0

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        num_external_computed_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        **options: Any,
    ) -> list[int] | None:
        """Take blocks for tokens whose KV comes from elsewhere, and for some to be computed."""
        if num_new_tokens == 0 and num_external_computed_tokens == 0:
            raise ValueError(
                "num_new_tokens must be greater than 0 when there are no computed tokens to adopt"
            )
        computed = request.num_computed_tokens + num_external_computed_tokens
        added = self.grow(request, computed + num_new_tokens + num_lookahead_tokens)
        if added is not None and request.request_id not in self.requests:
            self.ahead[request.request_id] = request
        return added

    def grow(self, request: Request, tokens: int) -> list[int] | None:
        """Let a request have blocks for so many tokens. Returns the new ones, or None if there are
        too few.
        """
        count = -(-tokens // BLOCK) - len(request.blocks)
        if count > self.block_pool.get_num_free_blocks():
            return None
        added = [block.block_id for block in self.block_pool.get_new_blocks(max(0, count))]
        request.blocks += added
        return added

    def fits(self, request: Request) -> bool:
        """Return whether there are blocks for all tokens of a request, which it gets one chunk
        after the other.
        """
        return (
            -(-request.num_tokens // BLOCK) - len(request.blocks)
            <= self.block_pool.get_num_free_blocks()
        )

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Do nothing: nothing is cached."""

    def take_new_block_ids(self) -> list[int]:
        """Return new blocks that are to be zeroed: none is."""
        return []

    def take_over(self, request: Request) -> None:
        """Let a request have the blocks that were taken under its id: vLLM knows requests by their
        ids alone.
        """
        earlier = self.ahead.pop(request.request_id, request)
        request.blocks = earlier.blocks

    def free(self, request: Request) -> None:
        """Free the blocks of a request, if it has some."""
        self.take_over(request)
        self.block_pool.free_blocks([self.block_pool.blocks[b] for b in reversed(request.blocks)])
        request.blocks = []


class FakeScheduler:
    """First come, first served, in chunks; admitted when all tokens fit; the last is preempted when
    blocks run out. So does vLLM's, without a prefix cache: test_scheduler_fake.py compares their
    plans.
    """

    policy = SchedulingPolicy.FCFS
    num_spec_tokens = 0

    def __init__(
        self, blocks: int, *, budget: int = 8, max_running: int = 4, pool: Any = None
    ) -> None:
        self.pool = (
            BlockPool(blocks, enable_caching=True, hash_block_size=BLOCK) if pool is None else pool
        )
        self.requests: dict[str, Request] = {}
        self.kv_cache_manager = Manager(self.pool, self.requests)
        self.block_size, self.max_model_len = BLOCK, 10_000
        self.max_num_scheduled_tokens = budget
        self.max_num_running_reqs = max_running
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.kv_holding_waiting: list[Request] = []
        self.constrained: set[str] = set()
        self.bitmask = np.zeros((8, 2), dtype=np.int32)
        self.preempted_now = False
        self.finished: set[str] = set()
        self.outputs: list[Any] = []
        self.done: list[str] = []
        self.hooks = LaneHooks()
        self.cached_tokens: dict[str, int] = {}
        self.hit_tokens: dict[str, int] = {}

    # ---- what groups call

    def has_requests(self) -> bool:
        """Whether there is anything to schedule or to tell the workers."""
        return bool(self.requests or self.finished)

    def get_num_unfinished_requests(self) -> int:
        """Return how many run and wait."""
        return len(self.requests)

    def get_request_counts(self) -> tuple[int, int]:
        """Return how many run, and how many wait."""
        return len(self.running), len(self.waiting) + len(self.kv_holding_waiting)

    @property
    def arrived_tokens(self) -> dict[str, int]:
        """Tokens of requests that have come with KV, which nobody asks for."""
        return {}

    def make_stats(self) -> SchedulerStats:
        """Return what vLLM's makes of this lane alone."""
        stats = SchedulerStats(*self.get_request_counts(), kv_cache_usage=self.pool.get_usage())
        self.hooks.stats_made(stats)
        return stats

    def get_grammar_bitmask(self, plan: SchedulerOutput) -> GrammarOutput | None:
        """Return which requests must keep to a grammar, in a buffer that is used again, as vLLM's
        is.
        """
        constrained = [name for name in plan.num_scheduled_tokens if name in self.constrained]
        return GrammarOutput(constrained, self.bitmask[: len(constrained)]) if constrained else None

    def schedule(self) -> SchedulerOutput:
        """Let each running request compute what it can, then admit waiting ones."""
        plan = SchedulerOutput.make_empty()
        plan.finished_req_ids, self.finished = self.finished, set()
        left = self._schedule_running(plan, self.max_num_scheduled_tokens)
        if not self.preempted_now:
            self._admit(plan, left)
        self.preempted_now = False
        plan.total_num_scheduled_tokens = sum(plan.num_scheduled_tokens.values())
        for request_id, tokens in plan.num_scheduled_tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens, request.num_in_flight_tokens = (
                request.computed + tokens,
                tokens,
            )
        self.hooks.step_planned(plan)
        return plan

    def _schedule_running(self, plan: SchedulerOutput, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            tokens = min(budget, request.num_tokens - request.computed)
            added = self.kv_cache_manager.grow(request, request.computed + tokens)
            if added is None:
                self._preempt(self.running[-1])
                continue
            self._tell(plan, request, added, tokens)
            budget -= tokens
            index += 1
        return budget

    def _admit(self, plan: SchedulerOutput, budget: int) -> None:
        while budget and len(self.running) < self.max_num_running_reqs:
            queue = self.kv_holding_waiting or self.waiting
            if not queue or not self.kv_cache_manager.fits(queue[0]):
                break
            request = queue.pop(0)
            self.running.append(request)
            tokens = min(budget, request.num_tokens - request.computed)
            self.kv_cache_manager.grow(request, request.computed + tokens)
            if request.status is RequestStatus.PREEMPTED:
                plan.scheduled_cached_reqs.resumed_req_ids.add(request.request_id)
                self._tell(plan, request, list(request.blocks), tokens)
            else:
                blocks = (list(request.blocks),)
                new = new_request(
                    request.request_id, request.num_prompt_tokens, blocks, request.computed
                )
                plan.scheduled_new_reqs.append(new)
                plan.num_scheduled_tokens[request.request_id] = tokens
            request.status = RequestStatus.RUNNING
            budget -= tokens

    def _tell(self, plan: SchedulerOutput, request: Request, added: list[int], tokens: int) -> None:
        cached = plan.scheduled_cached_reqs
        cached.req_ids.append(request.request_id)
        cached.new_block_ids.append((added,) if added else None)
        cached.num_computed_tokens.append(request.computed)
        cached.num_output_tokens.append(request.num_tokens - request.num_prompt_tokens)
        plan.num_scheduled_tokens[request.request_id] = tokens

    def _preempt(self, request: Request) -> None:
        self.preempted_now = True
        self.running.remove(request)
        self.waiting.insert(0, request)
        self._free_request_blocks(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0

    def update_from_output(self, plan: SchedulerOutput, output: Any) -> Any:
        """Count what was computed, add a token where a request has caught up, end those that have
        all.
        """
        self.hooks.output_received(plan)
        self.outputs.append(output)
        for request_id, tokens in plan.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_in_flight_tokens -= tokens
            if request.num_computed_tokens == request.num_tokens:
                request.num_tokens += 1
                if request.num_tokens - request.num_prompt_tokens == request.max_tokens:
                    self.done.append(request_id)
                    self.end(request_id, RequestStatus.FINISHED_LENGTH_CAPPED)
        return {0: ("outputs of", sorted(plan.num_scheduled_tokens))}

    def add_request(self, request: Request) -> None:
        """A request arrives; it has KV, and blocks with it, if it has computed tokens."""
        self.kv_cache_manager.take_over(request)
        self.requests[request.request_id] = request
        (self.kv_holding_waiting if request.num_computed_tokens else self.waiting).append(request)

    # ---- what tests call

    def add(self, request_id: str, prompt: int, max_tokens: int) -> None:
        """A request arrives that is new."""
        self.add_request(Request(request_id, prompt, max_tokens))

    def finish_requests(self, request_ids: Iterable[str] | None, status: Any) -> list[Request]:
        """What vLLM's does when requests are aborted; None: all of them."""
        ended = list(self.requests) if request_ids is None else list(request_ids)
        requests = [self.requests[request_id] for request_id in ended]
        for request_id in ended:
            self.end(request_id, status)
        return requests

    def end(self, request_id: str, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> None:
        """A request is over, or aborted."""
        request = self.requests[request_id]
        request.status = status
        for queue in (self.running, self.waiting, self.kv_holding_waiting):
            if request in queue:
                queue.remove(request)
        self.finished.add(request_id)
        self._free_request_blocks(request)
        del self.requests[request_id]

    def _free_request_blocks(self, request: Request) -> None:
        self.hooks.blocks_freed(request)
        self.cached_tokens.pop(request.request_id, None)
        self.kv_cache_manager.free(request)


def new_request(
    request_id: str, prompt: int, block_ids: tuple[list[int], ...], computed: int = 0
) -> NewRequestData:
    """Return what a plan says of a request that is scheduled for the first time."""
    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=list(range(prompt)),
        mm_features=[],
        sampling_params=None,
        pooling_params=None,
        block_ids=block_ids,
        num_computed_tokens=computed,
        lora_request=None,
    )


def cached_requests(
    names: Iterable[str], new_block_ids: Sequence[tuple[list[int], ...] | None]
) -> CachedRequestData:
    """Return what a plan says of requests that ran before."""
    cached = CachedRequestData.make_empty()
    cached.req_ids = list(names)
    cached.new_block_ids = list(new_block_ids)
    cached.num_computed_tokens = [7] * len(cached.req_ids)
    cached.num_output_tokens = [1] * len(cached.req_ids)
    return cached


def nothing(*things: Any) -> None:
    """Hear nothing."""


@dataclass(frozen=True)
class Hooks:
    """Hooks of a scheduler, each a function that a test gives."""

    step_planned: Callable[[Any], None] = nothing
    output_received: Callable[[Any], None] = nothing
    blocks_freed: Callable[[Any], None] = nothing
    stats_made: Callable[[Any], None] = nothing
    requests_failed: Callable[[Any, str], None] = nothing
