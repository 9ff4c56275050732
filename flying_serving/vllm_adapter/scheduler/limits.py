"""The requests that a scheduler's next step has to serve, from which the limit on its prompts
follows.
"""

from typing import Any

from flying_serving.scheduling.batches import Running


def step_tokens(config: Any) -> int:
    """Return the most tokens of a step of a request that decodes, with a VllmConfig: one and its
    drafts.
    """
    return 1 + int(config.num_speculative_tokens)


def running_of(scheduler: Any) -> tuple[Running, int]:
    """Return the requests that a vLLM scheduler has to serve, between two steps, and the tokens of
    a step that those of them take which decode.
    """
    decoding = context_tokens = prefilling = computed_tokens = decode_tokens = 0
    for request in scheduler.running:
        computed = request.num_computed_tokens - request.num_output_placeholders
        if request.num_tokens - computed <= 1:
            decoding += 1
            decode_tokens += 1 + len(request.spec_token_ids)
            context_tokens += computed
        else:
            computed_tokens = computed_tokens if prefilling else computed
            prefilling += 1
    for request in scheduler.kv_holding_waiting:
        if request.num_tokens - request.num_computed_tokens <= 1:
            decoding += 1
            decode_tokens += 1 + scheduler.num_spec_tokens
            context_tokens += request.num_computed_tokens
    return Running(decoding, context_tokens, prefilling, computed_tokens), decode_tokens
