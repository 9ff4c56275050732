"""The scheduler of a lane: vLLM's own, which tells the engine of its steps and limits prompts."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from flying_serving.errors import ConfigError
from flying_serving.layout.groups import Group
from flying_serving.scheduling.batches import Running
from flying_serving.vllm_adapter.request_kinds import scheduler_kinds
from flying_serving.vllm_adapter.scheduler.limits import running_of

PromptLimit = Callable[[Running], int | None]
"""Returns how many prompt tokens a step may take beside these running requests; None: as many as
fit.
"""


class LaneHooks:
    """The reports of a lane's scheduler to its engine. Here nothing hears of them."""

    def step_planned(self, plan: Any) -> None:
        """Report a planned step: its SchedulerOutput."""

    def output_received(self, plan: Any) -> None:
        """Report the output of this step, which has come. The scheduler takes it after this
        call.
        """

    def blocks_freed(self, request: Any) -> None:
        """Report blocks of this request that are freed after this call. They are still its own."""

    def stats_made(self, stats: Any) -> None:
        """Report SchedulerStats that are handed out after this call, which may change them."""

    def requests_failed(self, requests: Sequence[Any], why: str) -> None:
        """Report requests that the scheduler has ended with an error."""


class LaneScheduler(Scheduler):
    """vLLM's scheduler for one lane: `lane_class` lays it over the class that vLLM would take.

    It decides as vLLM's does, with one exception: `_limit_prompts`. Kinds of requests have classes
    between the two (`vllm_adapter/request_kinds.py`).
    """

    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

        self.hooks = LaneHooks()
        self.prompt_limit: PromptLimit | None = None
        """Asked before each step; None: no limit is set."""
        self.cached_tokens: dict[str, int] = {}
        """By request: tokens that the prefix cache had when the request got its blocks."""
        self.group: Group = ()
        """The engines whose steps it plans."""
        self.clock = time.monotonic
        self.hit_tokens: dict[str, int] = {}
        """By request: tokens that a prefix cache had when it first got blocks, here or in the group
        where it began.
        """
        self.arrived_tokens: dict[str, int] = {}
        """By request that came with its KV since the last step: how many of its tokens have KV."""

        self._most_step_tokens = self.max_num_scheduled_tokens
        self._most_chunk_tokens = self.scheduler_config.long_prefill_token_threshold
        self._has_arrived = False

    # ---- the hooks

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step as vLLM does, with limited prompts, and report it."""
        self._limit_prompts()
        plan = super().schedule(*args, **kwargs)
        self.hooks.step_planned(plan)
        return plan

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Report an output, then take it as vLLM does."""
        self.hooks.output_received(scheduler_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Make statistics as vLLM does, and report them; None with --disable-log-stats."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None:
            self.hooks.stats_made(stats)
        return stats

    def _get_new_block_ids_to_zero(self) -> list[int] | None:
        """Return what vLLM does, and the blocks behind the KV that requests have come with."""
        for kind in self.kv_cache_manager.coordinator.single_type_managers:
            if kind.records_new_block_ids:
                for request_id, tokens in self.arrived_tokens.items():
                    own = kind.req_to_blocks.get(request_id, [])
                    behind = own[-(-tokens // kind.block_size) :]
                    kind.new_block_ids += [block.block_id for block in behind]
        self.arrived_tokens.clear()
        return super()._get_new_block_ids_to_zero()

    def _free_request_blocks(self, request: Any) -> None:
        self.hooks.blocks_freed(request)
        self.cached_tokens.pop(request.request_id, None)
        if request.is_finished():
            self.hit_tokens.pop(request.request_id, None)
        super()._free_request_blocks(request)

    def _get_local_prefix_cache_hit(self, request: Any) -> Any:
        hit = super()._get_local_prefix_cache_hit(request)
        self.cached_tokens[request.request_id] = hit[1]
        if request.num_preemptions == 0:  # later the cache has what was computed for it
            self.hit_tokens[request.request_id] = hit[1]
        return hit

    # ---- the limit on prompts

    def _limit_prompts(self) -> None:
        """Let the next step take no token from requests that decode.

        vLLM gives tokens to running requests in the order of their admission, and the rest to
        waiting ones. A request that has come with its KV, from another group, would get no token
        until the prompts before it are computed. While such prompts run, they leave one token to
        each request that decodes. With a `prompt_limit` they do so in every step.

        A limit for the step alone (`max_num_scheduled_tokens`) would let two prompts take the
        tokens of requests that decode. So the share of one prompt (`long_prefill_token_threshold`)
        is limited too.
        """
        self.max_num_scheduled_tokens = self._most_step_tokens
        self.scheduler_config.long_prefill_token_threshold = self._most_chunk_tokens

        self._has_arrived = self._has_arrived or bool(self.kv_holding_waiting)
        if not self._has_arrived and self.prompt_limit is None:
            return

        # running requests are counted only where it matters: the count looks at each of them
        running, decode_tokens = running_of(self)
        prompts_run = running.prefilling > 0 or bool(self.kv_holding_waiting)
        self._has_arrived = self._has_arrived and prompts_run

        prompt_tokens = None if self.prompt_limit is None else self.prompt_limit(running)
        if prompt_tokens is None and self._has_arrived:
            prompt_tokens = max(1, self._most_step_tokens - decode_tokens)
        if prompt_tokens is not None:
            self._take_at_most(prompt_tokens, running.prefilling, decode_tokens)

    def _take_at_most(self, prompt_tokens: int, prefilling: int, decode_tokens: int) -> None:
        # a request that decodes may take as many
        chunk_tokens = max(1 + self.num_spec_tokens, prompt_tokens // max(1, prefilling))
        if self._most_chunk_tokens:  # 0 is vLLM's default: no limit
            chunk_tokens = min(chunk_tokens, self._most_chunk_tokens)
        self.scheduler_config.long_prefill_token_threshold = chunk_tokens

        # each prompt takes its least, also where these exceed the limit: decodes keep their tokens
        of_prompts = max(prompt_tokens, chunk_tokens * prefilling)
        step_tokens = min(self._most_step_tokens, decode_tokens + of_prompts)
        self.max_num_scheduled_tokens = step_tokens


# ---- which class a lane's scheduler has


@cache
def lane_class(base: type[Any], kinds: tuple[type[Any], ...] = ()) -> type[Any]:
    """Return the LaneScheduler over a scheduler class: vLLM's (synchronous or asynchronous), or a
    user's. `kinds`: classes between them.

    Raises:
        ConfigError: if the user's class is no subclass of vLLM's Scheduler.
    """
    if issubclass(base, LaneScheduler):
        return base
    if not issubclass(base, Scheduler):
        raise ConfigError(
            f"--scheduler-cls={base.__qualname__}: must be a subclass of {Scheduler.__qualname__}"
        )
    bases = (*kinds, base)
    if bases == (Scheduler,):
        return LaneScheduler
    return type(f"Lane{base.__name__}", (LaneScheduler, *bases), {"__module__": __name__})


def use_lane_class(config: Any) -> None:
    """Let vLLM's engine make its scheduler as `lane_class` says, by the seam `scheduler_cls` of a
    VllmConfig.

    vLLM then warns of a custom class, which the user has not chosen: that line is left out. For a
    class that the user has chosen vLLM still warns here.

    Raises: as `lane_class`.
    """
    scheduler = config.scheduler_config
    scheduler.scheduler_cls = lane_class(scheduler.get_scheduler_cls(), scheduler_kinds(config))
    logging.getLogger("vllm.config.scheduler").addFilter(_is_not_of_a_lane_class)


def _is_not_of_a_lane_class(record: logging.LogRecord) -> bool:
    named = record.args if isinstance(record.args, tuple) else ()
    return not any(isinstance(arg, type) and issubclass(arg, LaneScheduler) for arg in named)


def most_outstanding(scheduler: Any) -> int:
    """Return how many steps of a scheduler may be planned before the output of the first is taken.

    A scheduler that counts the tokens of outstanding steps may plan one step ahead.
    """
    return 2 if isinstance(scheduler, AsyncScheduler) else 1


def may_plan_ahead(scheduler: Any) -> bool:
    """Return whether the next step needs no token of the step before: its output is outstanding.

    A grammar needs the token to say which may follow.
    """
    return not any(request.use_structured_output for request in scheduler.running)


def make_scheduler(core: Any, config: Any, kv_config: Any) -> Any:
    """Make the scheduler of a group, as vLLM's EngineCore `core` makes its own.

    `config`, `kv_config`: the VllmConfig and the KVCacheConfig of the lane.

    Raises: as `lane_class`.
    """
    block_tokens, hash_block_tokens = resolve_kv_cache_block_sizes(kv_config, config)
    stock = config.scheduler_config.get_scheduler_cls()
    return lane_class(stock, scheduler_kinds(config))(
        vllm_config=config,
        kv_cache_config=generate_scheduler_kv_cache_config([kv_config]),
        structured_output_manager=core.structured_output_manager,
        log_stats=core.log_stats,
        block_size=block_tokens,
        hash_block_size=hash_block_tokens,
    )


def block_hasher(config: Any, kv_config: Any) -> Any:
    """Return the function that hashes a request's blocks for a lane's prefix cache.

    To be called once the engine has prefix caching.
    """
    _, hash_block_tokens = resolve_kv_cache_block_sizes(kv_config, config)
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    return get_request_block_hasher(hash_block_tokens, hash_function)
