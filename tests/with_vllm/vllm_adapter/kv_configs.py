"""Configurations of KV caches: of one layer, and as vLLM lays out groups of layers in memory."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout


def of_one_layer(blocks: int, block_tokens: int) -> KVCacheConfig:
    """A KV cache without memory, for a scheduler."""
    spec = FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    return KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])


def laid_out(
    layout: KVCacheLayout, groups: Sequence[KVCacheGroupSpec], memory_bytes: int
) -> KVCacheConfig:
    """A KV cache of groups of layers in so much memory, as vLLM makes it."""
    config: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
    )
    return get_kv_cache_config_from_groups(config, list(groups), memory_bytes)
