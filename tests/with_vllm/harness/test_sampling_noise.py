"""The noise of a seeded request is that with which vLLM has sampled."""

import pytest
import torch
import vllm._custom_ops  # noqa: F401 - loads the operation
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from harness.sampling_noise import noise_lead

TOKENS = 40


@pytest.mark.parametrize("step", [0, 3])
def test_sampled_token_leads_every_other(step: int) -> None:
    sampler = TopKTopPSampler()
    generator = torch.Generator().manual_seed(7)
    for number in range(step + 1):
        logits = torch.randn(1, TOKENS, generator=torch.Generator().manual_seed(number))
        sampled = int(sampler.forward_cpu(logits.clone(), {0: generator}, None, None)[0])
    for other in set(range(TOKENS)) - {sampled}:
        lead = float(logits[0, sampled] - logits[0, other])
        assert lead + noise_lead(7, step, sampled, other) > 0
        assert lead + noise_lead(7, step + 1, sampled, other) != pytest.approx(lead)


def test_lead_is_that_of_one_token_over_the_other() -> None:
    assert noise_lead(7, 2, 3, 5) == pytest.approx(-noise_lead(7, 2, 5, 3), abs=1e-5)
