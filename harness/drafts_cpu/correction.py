"""Values of requests for each of their draft tokens, by indices; top_k where there are none."""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch


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


def keep_most_likely(
    logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """Return logits (draft tokens, vocabulary) with top_k and top_p applied, also to none."""
    return apply_top_k_top_p_pytorch(logits, k, p, allow_cpu_sync=False)


def correct(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Let vLLM take these in place of what it has for the CPU."""
    replace(rejection_sampler, "expand_batch_to_tokens", expand)
    replace(rejection_sampler, "apply_top_k_top_p", keep_most_likely)
