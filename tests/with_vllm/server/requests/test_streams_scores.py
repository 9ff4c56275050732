"""why_unscored: an output whose logprobs are missing, or of other tokens, is named."""

from typing import Any

import numpy as np
import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import LogprobsLists

from flying_serving.server.requests.streams import why_unscored


def output_of(tokens: list[int], of_logprobs: list[list[int]] | None) -> EngineCoreOutput:
    """An output; its logprobs have a row for each token, with the sampled token first."""
    logprobs: Any = None
    if of_logprobs is not None:
        ids = np.array(of_logprobs or np.zeros((0, 1)), dtype=np.int32)
        logprobs = LogprobsLists(ids, np.zeros(ids.shape), np.zeros(len(ids)))
    return EngineCoreOutput("a", tokens, new_logprobs=logprobs)


@pytest.mark.parametrize(
    ("tokens", "of_logprobs"),
    [([5], [[5]]), ([5, 6], [[5, 9], [6, 9]]), ([], []), ([], None)],
    ids=["sampled only", "two tokens, most likely ones too", "no token", "an end"],
)
def test_tokens_with_their_own_logprobs_are_no_error(
    tokens: list[int], of_logprobs: list[list[int]] | None
) -> None:
    assert why_unscored(output_of(tokens, of_logprobs), SamplingParams(logprobs=0)) is None


@pytest.mark.parametrize(
    "params", [None, SamplingParams(), SamplingParams(logprobs=-1)], ids=["pooling", "none", "all"]
)
def test_outputs_of_requests_without_such_logprobs_are_not_compared(
    params: SamplingParams | None,
) -> None:
    assert why_unscored(output_of([5], None), params) is None


def test_a_step_without_logprobs_is_named() -> None:
    assert why_unscored(output_of([5], None), SamplingParams(logprobs=0)) == (
        "an output with tokens [5] has no logprobs"
    )


@pytest.mark.parametrize(
    ("tokens", "of_logprobs", "others"),
    [([5], [[7, 5]], [7]), ([5, 6], [[5]], [5]), ([5], [[5], [6]], [5, 6])],
    ids=["another token", "a row less", "a row more"],
)
def test_logprobs_of_other_tokens_are_named(
    tokens: list[int], of_logprobs: list[list[int]], others: list[int]
) -> None:
    assert why_unscored(output_of(tokens, of_logprobs), SamplingParams(logprobs=2)) == (
        f"an output with tokens {tokens} has logprobs of tokens {others}"
    )
