"""vLLM's sampler on logits that are no numbers: its logprobs are of the token that it samples.

So they do not explain a token without its logprob (docs/design/cuda.md).
"""

import math

import pytest
import torch
from vllm.v1.sample.sampler import Sampler

from tests.with_vllm.vllm_adapter.cpu_build.sampling_metadata import metadata

VOCAB = 512
NAN, INF = math.nan, math.inf
ROWS: dict[str, list[tuple[slice, float]]] = {
    "numbers": [],
    "all NaN": [(slice(None), NAN)],
    "one NaN": [(slice(100, 101), NAN)],
    "first NaN": [(slice(0, 100), NAN)],
    "last NaN": [(slice(300, None), NAN)],
    "one infinite": [(slice(100, 101), INF)],
    "two infinite": [(slice(7, 8), INF), (slice(100, 101), INF)],
    "none possible": [(slice(None), -INF)],
}


def logits() -> torch.Tensor:
    """Return random logits, shape (rows, vocabulary), in which each row has its other values."""
    torch.manual_seed(3)
    made = torch.randn(len(ROWS), VOCAB)
    for row, changes in zip(made, ROWS.values(), strict=True):
        for place, value in changes:
            row[place] = value
    return made


@pytest.mark.deep
@pytest.mark.parametrize("sampling", ["forward_cpu", "forward_native"], ids=["CPU", "CUDA"])
@pytest.mark.parametrize(
    ("greedy", "seeded"),
    [(True, False), (False, False), (False, True)],
    ids=["greedy", "drawn", "seeded"],
)
@pytest.mark.parametrize("logprobs", [0, 2])
def test_logprobs_are_of_the_sampled_token_whatever_the_logits(
    sampling: str, greedy: bool, seeded: bool, logprobs: int
) -> None:
    sampler = Sampler()
    sampler.topk_topp_sampler.forward = getattr(sampler.topk_topp_sampler, sampling)
    output = sampler(logits(), metadata(len(ROWS), greedy=greedy, seeded=seeded, logprobs=logprobs))
    assert output.logprobs_tensors is not None
    of_logprobs = output.logprobs_tensors.logprob_token_ids[:, 0]
    assert output.sampled_token_ids[:, 0].tolist() == of_logprobs.tolist()
    values = output.logprobs_tensors.logprobs[:, 0].tolist()
    assert [math.isnan(value) for value in values] == [name != "numbers" for name in ROWS]
