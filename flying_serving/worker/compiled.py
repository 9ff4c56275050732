"""The check that compiled steps of lane 1 compute the same as its own code, at every start.

torch.compile drops all guards, as vLLM asks it to, so a graph that does not fit would be wrong
without an error.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from flying_serving.errors import LaneError
from flying_serving.vllm_adapter.batches import check_steps
from flying_serving.vllm_adapter.runner import Runner
from flying_serving.vllm_adapter.stages import Kind
from flying_serving.worker.selfcheck import Difference, compare, record, tolerance

COMPARED: Mapping[Kind, float] = {"logits": 1.0}
"""Stages that are compared, as TOKENS: no request may differ. Compiled code calls no other of the
model's modules.
"""


def check_compiled(lane1: Runner, requests: int, together: Callable[[bool], bool]) -> float:
    """Compare steps of `requests` prompts, compiled and not. `together`: takes whether this device
    refuses; returns whether any device of the engine does.

    Returns the largest difference of the logits, as a share of them.

    Raises:
        LaneError: on every device of the engine, if one of them finds a difference.
    """
    config = lane1.config
    vocabulary = config.model_config.get_vocab_size()
    steps: Callable[[], Iterator[Any]] = partial(
        check_steps, requests, vocabulary, config.cache_config.block_size
    )
    with lane1.uncompiled():
        expected = record(lane1.model, lane1.step, steps(), COMPARED)
    differences = compare(lane1.model, lane1.step, steps(), expected, COMPARED)
    reason = refusal(differences, tolerance(config.model_config.dtype))
    if together(reason is not None):
        raise LaneError(reason or "another device of the engine refuses its compiled model")
    return max(difference.share for difference in differences)


def refusal(differences: list[Difference], allowed: float) -> str | None:
    """Return why compiled steps must not be used, or None."""
    if not differences:
        return "--enforce-eager=False: no logits of the compiled model could be compared"
    largest = max(difference.share for difference in differences)
    if largest <= allowed:
        return None
    return (
        f"--enforce-eager=False: the compiled model differs from the eager one by {largest:.2g} of "
        f"its logits ({allowed:g} is allowed). Start with --enforce-eager, and please report this "
        "model"
    )
