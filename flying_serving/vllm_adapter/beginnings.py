"""Engines tell the API server when a request with a deadline begins: a scheduler has it in a step for the first time.

The message is an output without a token and without an end, which vLLM's scheduler never makes.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from flying_serving.vllm_adapter.keys import DEADLINE_KEY
from flying_serving.vllm_adapter.watch import watch_steps


def tell_beginnings(scheduler: Any, emit: Callable[[dict[int, EngineCoreOutputs]], None]) -> None:
    """Emit a message, by client, when a vLLM scheduler has made a step with new requests that have a deadline."""

    def began(plan: Any) -> None:
        begun = [new.req_id for new in plan.scheduled_new_reqs if _has_deadline(new.sampling_params)]
        if begun:
            emit({0: EngineCoreOutputs(outputs=[EngineCoreOutput(request_id, []) for request_id in begun])})

    watch_steps(scheduler, began, lambda _plan: None)


def is_beginning(output: EngineCoreOutput) -> bool:
    """Whether an output is such a message."""
    return not output.new_token_ids and output.finish_reason is None


def _has_deadline(params: Any) -> bool:
    return params is not None and DEADLINE_KEY in (params.extra_args or {})
