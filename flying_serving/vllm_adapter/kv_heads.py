"""The KV heads of a model, over which groups share the KV of a token."""

from typing import Any

from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend


def kv_heads_of(model_config: Any) -> int:
    """Return the KV heads of a model from vLLM's ModelConfig.

    With latent attention (MLA) a token's KV is one vector that all heads read. It is one head, and
    every rank of a group has it.
    """
    heads: int = 1 if model_config.use_mla else model_config.get_total_num_kv_heads()
    return heads


def latents_on_cpu(config: Any) -> int | None:
    """Return the numbers of a token's latent and rotated key if vLLM has no kernel for them on a
    CPU, else None.

    `config`: vLLM's VllmConfig.
    """
    model = config.model_config
    if not model.use_mla or config.device_config.device_type != "cpu":
        return None
    size: int = model.get_head_size()
    return None if size in CPUMLABackend.get_supported_head_sizes() else size
