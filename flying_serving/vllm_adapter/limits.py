"""How much of a step vLLM's scheduler may give to prompts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Running:
    """What a scheduler's running requests ask of its next step.

    `decoding`: requests with one token to compute, `context_tokens`: those before it. `prefilling`: the others, and
    `computed_tokens`: what the first of them has of its prompt.
    """

    decoding: int = 0
    context_tokens: int = 0
    prefilling: int = 0
    computed_tokens: int = 0

    @classmethod
    def of(cls, scheduler: Any) -> "Running":
        """Of a vLLM scheduler, between two steps."""
        decoding = context_tokens = prefilling = computed_tokens = 0
        for request in scheduler.running:
            computed = request.num_computed_tokens - request.num_output_placeholders
            if request.num_tokens_with_spec - computed <= 1:
                decoding += 1
                context_tokens += computed
            else:
                computed_tokens = computed_tokens if prefilling else computed
                prefilling += 1
        return cls(decoding, context_tokens, prefilling, computed_tokens)


def limit_prompts(scheduler: Any, prompt_tokens: Callable[[Running], int | None]) -> None:
    """Before each step of a vLLM scheduler ask how many prompt tokens it may take; None: as many as it likes.

    vLLM gives tokens to running requests in the order of their admission, so a limit for the step alone
    (`max_num_scheduled_tokens`) would let two prompts take those of requests that decode; what one prompt gets
    (`long_prefill_token_threshold`) is limited too.
    """
    schedule, config = scheduler.schedule, scheduler.scheduler_config
    step_tokens, chunk_tokens = scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold

    def limited(*args: Any, **kwargs: Any) -> Any:
        running = Running.of(scheduler)
        tokens = prompt_tokens(running)
        if tokens is None:
            scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold = step_tokens, chunk_tokens
        else:
            chunk = max(1, tokens // max(1, running.prefilling))
            scheduler.max_num_scheduled_tokens = min(step_tokens, running.decoding + tokens)
            config.long_prefill_token_threshold = min(chunk, chunk_tokens) if chunk_tokens else chunk
        return schedule(*args, **kwargs)

    scheduler.schedule = limited
