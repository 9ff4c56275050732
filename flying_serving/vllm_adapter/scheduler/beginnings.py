"""Messages to the API server at the beginning of a request with a deadline: a scheduler has it in a
step for the first time.

The message is an output without a token and without an end, which vLLM's scheduler never makes.
"""

from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from flying_serving.vllm_adapter.keys import DEADLINE_KEY


def beginnings_in(plan: Any) -> dict[int, EngineCoreOutputs] | None:
    """Return the message, by client, for new requests with a deadline in a SchedulerOutput.

    None if there is no such request in it.
    """
    begun = [new.req_id for new in plan.scheduled_new_reqs if _has_deadline(new.sampling_params)]
    if not begun:
        return None
    outputs = [EngineCoreOutput(request_id, []) for request_id in begun]
    return {0: EngineCoreOutputs(outputs=outputs)}


def is_beginning(output: EngineCoreOutput) -> bool:
    """Return whether an output is such a message."""
    return not output.new_token_ids and output.finish_reason is None


def _has_deadline(params: Any) -> bool:
    return params is not None and DEADLINE_KEY in (params.extra_args or {})
