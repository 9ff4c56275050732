"""The KV heads of a model, over which groups share the KV of a token."""

from typing import Any


def kv_heads_of(model_config: Any) -> int:
    """Return the KV heads of a model from vLLM's ModelConfig.

    With latent attention (MLA) a token's KV is one vector that all heads read. It is one head, and
    every rank of a group has it.
    """
    heads: int = 1 if model_config.use_mla else model_config.get_total_num_kv_heads()
    return heads
