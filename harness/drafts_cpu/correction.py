"""Values of requests for each of their draft tokens, by indices."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.v1.sample import rejection_sampler


def expand(
    values: torch.Tensor,
    ends: torch.Tensor,
    count: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Return the value of the request of each draft token: (count,). `ends`: of each request's
    drafts, counted over all requests.
    """
    rows = torch.searchsorted(ends.long(), torch.arange(count), right=True)
    expanded = values[rows].clone()
    expanded[expanded == replace_from] = replace_to
    return expanded


def correct(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Let vLLM take this in place of its kernel for the CPU."""
    replace(rejection_sampler, "expand_batch_to_tokens", expand)
