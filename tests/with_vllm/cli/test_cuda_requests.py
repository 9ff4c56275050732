"""Flags of vLLM that have another default on CUDA, for engines that form groups."""

import argparse

import pytest
from vllm.platforms import current_platform

from flying_serving.cli.cuda_defaults import limit_requests


@pytest.mark.parametrize(
    ("is_cuda", "engines", "given", "step_tokens", "expected"),
    [
        (True, 2, None, None, 256),
        (True, 8, None, 8192, 256),
        (True, 2, None, 64, 64),
        (True, 2, 1024, None, 1024),
        (True, 1, None, None, None),  # vLLM's own
        (False, 2, None, None, None),
    ],
)
def test_requests_at_a_time_are_fewer_where_lanes_have_memory_for_each(
    monkeypatch: pytest.MonkeyPatch,
    is_cuda: bool,
    engines: int,
    given: int | None,
    step_tokens: int | None,
    expected: int | None,
) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: is_cuda)
    args = argparse.Namespace(
        max_num_seqs=given, data_parallel_size=engines, max_num_batched_tokens=step_tokens
    )
    limit_requests(args)
    assert args.max_num_seqs == expected
