"""Stock vLLM's rotary embeddings on the CPU, corrected for models that it serves wrongly there.

Its kernel takes queries of (tokens, heads * size). Latent attention and LFM 2 have (tokens, heads,
size), and then the kernel rotates heads by the positions of other tokens. DeepSeek's own embeddings
(YaRN) are not computed by this kernel.
"""

from __future__ import annotations

from collections.abc import Callable

LATENT = (
    "AXK1ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "LongcatFlashForCausalLM",
)
"""Architectures with latent attention that the CPU has a kernel for."""
CORRECTED = (
    "Glm4MoeLiteForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "LongcatFlashForCausalLM",
    "MistralLarge3ForCausalLM",
    "SarvamMLAForCausalLM",
)
"""Architectures with plain rotary embeddings that give the kernel a dimension of heads."""


def correct(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Let vLLM compute all plain rotary embeddings in torch, by its own code."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    replace(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)
