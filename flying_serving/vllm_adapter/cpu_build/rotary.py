"""Rotary embeddings of tensors that have a dimension for heads, on a CPU."""

from typing import Any

import torch


def rotate_heads(
    original: Any,
    self: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Wrap `RotaryEmbedding.forward_cpu`: rotate each head of each token by the token's position.

    vLLM's kernel for the CPU takes (tokens, heads * size). Latent attention (MLA) and LFM 2 have
    (tokens, heads, size). There the kernel rotates the first rows of heads by the positions of the
    first tokens, and leaves the others as they are. Such tensors are rotated in plain torch, as
    vLLM itself does with the embeddings of DeepSeek (YaRN).

    Returns rotated query and key, in place or not, as vLLM does.
    """
    by_head = positions.dim() + 1
    if query.dim() > by_head or (key is not None and key.dim() > by_head):
        rotated: tuple[torch.Tensor, torch.Tensor | None] = self.forward_native(
            positions, query, key
        )
        return rotated
    flat: tuple[torch.Tensor, torch.Tensor | None] = original(self, positions, query, key)
    return flat
