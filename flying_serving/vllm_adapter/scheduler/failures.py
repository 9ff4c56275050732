"""Messages to the API server at the end of requests that an engine ends with an error, in words.

The message is vLLM's output of a request that ends with an error. The words are in its
`stop_reason`, which vLLM sets only where a stop token or string has ended a request.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason


def failures(requests: Iterable[Any], why: str) -> dict[int, EngineCoreOutputs]:
    """Return the message, by client, that these vLLM requests end with the error `why`."""
    outputs = defaultdict[int, list[EngineCoreOutput]](list)
    for request in requests:
        end = EngineCoreOutput(
            request.request_id, [], finish_reason=FinishReason.ERROR, stop_reason=why
        )
        outputs[request.client_index].append(end)
    return {
        client: EngineCoreOutputs(outputs=ends, finished_requests={end.request_id for end in ends})
        for client, ends in outputs.items()
    }


def why_failed(output: EngineCoreOutput) -> str | None:
    """Return the error of an output that is such a message; None if it is none."""
    if output.finish_reason != FinishReason.ERROR or not isinstance(output.stop_reason, str):
        return None
    return output.stop_reason
