"""Parameters of requests for each of their draft tokens, on the CPU."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.utils import cpu_triton_utils

from flying_serving.vllm_adapter.expansion import expand_on_cpu
from harness.drafts_cpu.correction import expand

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
