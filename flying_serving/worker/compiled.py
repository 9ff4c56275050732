"""The check that compiled steps of lane 1 compute the same as its own code, at every start.

torch.compile drops all guards, as vLLM asks it to, so a graph that does not fit would be wrong
without an error.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from flying_serving.errors import LaneError
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.vllm_adapter.model_runner.made_up_steps import check_steps
from flying_serving.vllm_adapter.model_runner.stages import Kind
from flying_serving.worker.selfcheck import FLOAT32_TOLERANCE, Difference, compare, record

COMPARED: Mapping[Kind, float] = {"logits": 1.0}
"""Stages that are compared, as TOKENS: no request may differ. Compiled code, or a replayed graph,
calls no other of the model's modules.
"""
HALF_TOLERANCE = 0.2
"""Largest difference that is allowed with weights of 16 bits, as a share of the logits.

Compiled code rounds fewer values between its operations, and rounding adds up over the layers. A
correct tiny model of four layers differs by 0.06 in bfloat16. Logits that have nothing in common
differ by 1.4.
"""


def check_compiled(lane1: DeviceLane, requests: int) -> float:
    """Compare steps of `requests` prompts, compiled and not.

    Returns the largest difference of the logits, as a share of them.

    Raises:
        LaneError: on every device of the engine, if one of them finds a difference.
    """
    config = lane1.config
    vocabulary = config.model_config.get_vocab_size()
    steps: Callable[[], Iterator[Any]] = partial(check_steps, requests, vocabulary, lane1.kv.groups)
    with lane1.uncompiled():
        expected = record(lane1.model, lane1.step, steps(), COMPARED)
    differences = compare(lane1.model, lane1.step, steps(), expected, COMPARED)
    reason = refusal(differences, allowed(config.model_config.dtype))
    if lane1.any_of(reason is not None):
        raise LaneError(reason or "another device of the engine refuses its compiled model")
    return max(difference.share for difference in differences)


def allowed(dtype: torch.dtype) -> float:
    """Return the largest share by which compiled steps may differ, for weights of this type."""
    return FLOAT32_TOLERANCE if dtype == torch.float32 else HALF_TOLERANCE


def refusal(differences: list[Difference], most: float) -> str | None:
    """Return why compiled steps must not be used, or None. `most`: as `allowed`."""
    if not differences:
        return "no logits of the compiled model could be compared"
    largest = max(difference.share for difference in differences)
    if largest <= most:
        return None
    return (
        f"the compiled model differs from the eager one by {largest:.2g} of its logits ({most:g} "
        "is allowed); please report this model"
    )
