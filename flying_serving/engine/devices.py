"""The answers of an engine's devices: the first one's counts, if all have sampled the same tokens.

Each device has a worker of its own, which samples for itself and keeps its tokens for the next
step. vLLM's executor hands the outputs of all of them to the engine.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput


class OutputOfDevicesApart(ModelRunnerOutput):
    """The first device's output of a step in which another device has sampled other tokens.

    `apart`: the first such device.
    """

    apart: int


def answer_of(answers: Sequence[Any]) -> Any:
    """Return the answer of an engine whose devices have given these.

    It is the first device's. Outputs of a step are compared: if a device has sampled other tokens
    than the first, an OutputOfDevicesApart is returned.
    """
    first, *others = answers
    if others and isinstance(first, ModelRunnerOutput):
        tokens = first.sampled_token_ids
        for device, answer in enumerate(others, 1):
            # a device that misses a member of the group has no output: the members will be told
            if isinstance(answer, ModelRunnerOutput) and answer.sampled_token_ids != tokens:
                return _apart(first, device)
    return first


def _apart(output: ModelRunnerOutput, device: int) -> OutputOfDevicesApart:
    marked = OutputOfDevicesApart(**vars(output))
    marked.apart = device
    return marked
