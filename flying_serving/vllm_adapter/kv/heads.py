"""The KV heads of a model: one for all with latent attention, and not the same number in all layers
of Gemma 4.
"""

from typing import Any


def kv_head_counts(model: Any) -> list[int]:
    """Return the numbers of KV heads that layers of a model (vLLM's ModelConfig) have, the fewest
    first, each once.

    With latent attention (MLA) a token's KV is one vector that all heads read. It is one head, and
    every rank of a group has it.
    """
    if model.use_mla:
        return [1]
    architecture = model.model_arch_config
    if architecture.per_layer_overrides is None:
        return [model.get_total_num_kv_heads()]
    layers = range(architecture.total_num_hidden_layers)
    return sorted({architecture[layer].total_num_kv_heads for layer in layers} - {0})


def fewest_kv_heads(model: Any) -> int:
    """Return the KV heads of the layers that have fewest.

    A lane cuts their KV least, so they bound the tokens of its blocks.
    """
    return kv_head_counts(model)[0]


def kv_heads_of(name: str, heads_here: int, devices: int, model: Any) -> int:
    """Return the KV heads of a layer on all devices of an engine together.

    `name`: of the layer. `heads_here`: on one of `devices`, which share a single one if there are
    fewer.
    """
    if model.use_mla:
        return 1
    if heads_here > 1 or devices == 1:
        return heads_here * devices
    # it takes torch, and the API server asks for the other functions alone
    from vllm.model_executor.models.utils import extract_layer_index

    heads: int = model.model_arch_config[extract_layer_index(name)].total_num_kv_heads
    return heads


def latents_on_cpu(config: Any) -> int | None:
    """Return the numbers of a token's latent and rotated key if vLLM has no kernel for them on a
    CPU. None: it has one, or the model has no latents.

    `config`: vLLM's VllmConfig.
    """
    model = config.model_config
    if not model.use_mla or config.device_config.device_type != "cpu":
        return None
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    size: int = model.get_head_size()
    return None if size in CPUMLABackend.get_supported_head_sizes() else size
