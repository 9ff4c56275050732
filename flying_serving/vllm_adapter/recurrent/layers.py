"""The recurrent states of vLLM's layers, and how ranks share them."""

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from flying_serving.layout.shards import Segment
from flying_serving.memory.states import StateCut


def groups_with_kv(kv: KVCacheConfig) -> list[KVCacheGroupSpec]:
    """Return the groups of layers that have KV, and no state."""
    return [g for g in kv.kv_cache_groups if not isinstance(g.kv_cache_spec, MambaSpec)]


def states_of(kv: KVCacheConfig, layers: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the state tensors of all layers that have some, group by group. `layers`: by name."""
    return [state for names in _names(kv) for name in names for state in layers[name].kv_cache]


def cuts_of(kv: KVCacheConfig, layers: Mapping[str, Any]) -> list[StateCut] | None:
    """Return how ranks share each of `states_of`, from lane 1's layers; None if a layer is of an
    unknown class.
    """
    found = []
    channels = 0 if is_conv_state_dim_first() else 1
    for number, names in enumerate(_names(kv)):
        for layer in (layers[name] for name in names):
            segments = _segments(layer)
            if segments is None or len(segments) != len(layer.kv_cache):
                return None
            dimensions = (channels, 0)[: len(segments)]
            cuts = zip(dimensions, segments, strict=True)
            found += [StateCut(number, dimension, segment) for dimension, segment in cuts]
    return found


def _names(kv: KVCacheConfig) -> list[list[str]]:
    """Return the names of layers that have state, by group."""
    return [g.layer_names for g in kv.kv_cache_groups if isinstance(g.kv_cache_spec, MambaSpec)]


def _segments(layer: Any) -> list[tuple[Segment, ...]] | None:
    """Return the segments of a layer's state of its convolution, and of its heads if it has any.
    None for an unknown class, or a layer that is cut in one engine already.
    """
    if isinstance(layer, ShortConv):
        return [(Segment(layer.conv_dim, layer.conv_dim),)]
    if not isinstance(layer, MambaMixer2 | QwenGatedDeltaNetAttention) or layer.tp_size > 1:
        return None
    if isinstance(layer, MambaMixer2):
        heads, groups = layer.num_heads, layer.n_groups
        inner = Segment(layer.intermediate_size, heads)
        of_group = Segment(layer.groups_ssm_state_size, groups)
        return [(inner, of_group, of_group), (Segment(heads, heads),)]
    keys, values = layer.num_k_heads, layer.num_v_heads
    key, value = Segment(layer.key_dim, keys), Segment(layer.value_dim, values)
    return [(key, key, value), (Segment(values, values),)]
