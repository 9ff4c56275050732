"""How much of a step vLLM's scheduler may give to prompts."""

from collections.abc import Callable
from typing import Any

from flying_serving.scheduling.batches import Running


def running_of(scheduler: Any) -> Running:
    """What a vLLM scheduler has to serve, between two steps."""
    decoding = context_tokens = prefilling = computed_tokens = 0
    for request in scheduler.running:
        computed = request.num_computed_tokens - request.num_output_placeholders
        if request.num_tokens_with_spec - computed <= 1:
            decoding += 1
            context_tokens += computed
        else:
            computed_tokens = computed_tokens if prefilling else computed
            prefilling += 1
    for request in scheduler.kv_holding_waiting:
        if request.num_tokens - request.num_computed_tokens <= 1:
            decoding += 1
            context_tokens += request.num_computed_tokens
    return Running(decoding, context_tokens, prefilling, computed_tokens)


def limit_prompts(scheduler: Any, prompt_tokens: Callable[[Running], int | None] | None = None) -> None:
    """Let a vLLM scheduler's steps take no token from requests that decode.

    vLLM gives tokens to running requests in the order of their admission, and what is left to those that wait. One that
    has come with its KV, from another group, would get none until the prompts that ran before it are done: until then
    prompts leave one token to each that decodes. With `prompt_tokens`, which is asked before each step how many prompt
    tokens that may take, they always do; it may answer None: as many as fit.

    A limit for the step alone (`max_num_scheduled_tokens`) would let two prompts take those of requests that decode;
    what one prompt gets (`long_prefill_token_threshold`) is limited too.
    """
    schedule, config = scheduler.schedule, scheduler.scheduler_config
    step_tokens, chunk_tokens = scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold

    has_arrived = False

    def limited(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_arrived
        scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold = step_tokens, chunk_tokens
        has_arrived = has_arrived or bool(scheduler.kv_holding_waiting)
        if has_arrived or prompt_tokens is not None:
            running = running_of(scheduler)
            has_arrived = has_arrived and (running.prefilling > 0 or bool(scheduler.kv_holding_waiting))
            tokens = None if prompt_tokens is None else prompt_tokens(running)
            if tokens is None and has_arrived:
                tokens = max(1, step_tokens - running.decoding)
            if tokens is not None:
                chunk = max(1, tokens // max(1, running.prefilling))
                scheduler.max_num_scheduled_tokens = min(step_tokens, running.decoding + tokens)
                config.long_prefill_token_threshold = min(chunk, chunk_tokens) if chunk_tokens else chunk
        return schedule(*args, **kwargs)

    scheduler.schedule = limited
