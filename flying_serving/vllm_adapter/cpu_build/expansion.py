"""Parameters of requests for each of their draft tokens, of which there may be none."""

from typing import Any

import torch
from vllm.platforms import current_platform


def expand_on_cpu(
    original: Any,
    x: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Wrap `expand_batch_to_tokens`: on a CPU, repeat each value in plain torch.

    x: (requests,). cu_num_tokens: (requests,), the draft tokens of all requests up to each one.
    Returns (num_tokens,), with `replace_to` for values that are `replace_from`.

    vLLM's kernel for the CPU writes into a copy of the result as int64, and the copy is dropped.
    So the temperatures by which logits are divided would be memory that was never written.
    """
    if not current_platform.is_cpu():
        expanded: torch.Tensor = original(x, cu_num_tokens, num_tokens, replace_from, replace_to)
        return expanded
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def constrain_drafts(
    original: Any, logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: Any
) -> torch.Tensor:
    """Wrap `apply_sampling_constraints`: a step may have no drafts, and nothing to constrain then.

    logits: (draft tokens, vocabulary). On a CPU vLLM asks for the largest `top_k` of the drafts,
    and the engine ends where there is none.
    """
    if not len(logits):
        return logits
    constrained: torch.Tensor = original(logits, cu_num_draft_tokens, sampling_metadata)
    return constrained
