"""Parameters of requests for each of their draft tokens, on the CPU."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.rejection_sampler import apply_sampling_constraints

from flying_serving.vllm_adapter.cpu_build.expansion import constrain_drafts, expand_on_cpu
from harness.drafts_cpu.correction import correct, expand
from tests.with_vllm.vllm_adapter.cpu_build.sampling_metadata import metadata

VOCAB = 32
COUNTS = st.lists(st.integers(0, 4), min_size=1, max_size=6)


@given(COUNTS, st.sampled_from([torch.float32, torch.int32]))
def test_each_draft_has_the_value_of_its_request(counts: list[int], dtype: torch.dtype) -> None:
    values = torch.arange(len(counts), dtype=dtype)
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    expected = [9 if i == 0 else i for i, count in enumerate(counts) for _ in range(count)]
    for function in (lambda *given: expand_on_cpu(None, *given), expand):
        made = function(values, ends, sum(counts), 0, 9)
        assert made.dtype == dtype
        assert made.tolist() == expected


def test_the_kernel_of_the_cpu_writes_nothing() -> None:
    """The reason for the patch: what vLLM hands on is the memory that it has allocated."""
    allocated = torch.full((3,), -5.0)
    ends = torch.tensor([2, 3], dtype=torch.int32)
    cpu_triton_utils._expand_kernel_impl(allocated, torch.tensor([0.5, 2.0]), ends, 0, 1)
    assert allocated.tolist() == [-5.0, -5.0, -5.0]


def of_two(**fields: torch.Tensor) -> SamplingMetadata:
    """Return the parameters of two requests that sample."""
    made = metadata(2, greedy=False, seeded=False, logprobs=0)
    return replace(made, temperature=torch.tensor([1.0, 0.5]), **fields)


CONSTRAINED = [
    of_two(),
    of_two(top_k=torch.tensor([3, VOCAB])),
    of_two(top_p=torch.tensor([0.7, 1.0])),
    of_two(top_k=torch.tensor([3, VOCAB]), top_p=torch.tensor([0.7, 1.0])),
]


@pytest.mark.parametrize("of_requests", CONSTRAINED, ids=["", "top_k", "top_p", "both"])
def test_a_step_without_drafts_has_nothing_to_constrain(
    of_requests: SamplingMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In our engines, and in stock's that tests compare with."""
    none, ends = torch.empty(0, VOCAB), torch.zeros(2, dtype=torch.int32)
    assert constrain_drafts(apply_sampling_constraints, none, ends, of_requests) is none
    correct(monkeypatch.setattr)
    assert apply_sampling_constraints(none, ends, of_requests).shape == none.shape


@pytest.mark.parametrize("of_requests", CONSTRAINED, ids=["", "top_k", "top_p", "both"])
def test_drafts_are_constrained_as_in_stock(
    of_requests: SamplingMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts, ends = torch.randn(3, VOCAB), torch.tensor([2, 3], dtype=torch.int32)
    constrain = partial(constrain_drafts, apply_sampling_constraints)
    with monkeypatch.context() as ours:
        ours.setattr(rejection_sampler, "expand_batch_to_tokens", partial(expand_on_cpu, None))
        found = constrain(drafts.clone(), ends, of_requests)
    correct(monkeypatch.setattr)
    assert torch.equal(found, apply_sampling_constraints(drafts.clone(), ends, of_requests))


def test_stock_ends_of_top_k_where_no_request_has_drafts() -> None:
    """The reason for the patch."""
    with pytest.raises(RuntimeError, match="reduction dim"):
        apply_top_k_top_p_pytorch(
            torch.empty(0, VOCAB), torch.empty(0, dtype=torch.int32), None, allow_cpu_sync=True
        )
