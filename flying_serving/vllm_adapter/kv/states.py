"""The recurrent states of vLLM's layers, and how ranks share them."""

from collections.abc import Sequence
from typing import Any

from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from flying_serving.layout.shards import Segment
from flying_serving.memory.states import StateCut


def state_layers(kv: KVCacheConfig) -> list[str]:
    """Return the names of layers that have state, group by group."""
    groups = [g for g in kv.kv_cache_groups if isinstance(g.kv_cache_spec, MambaSpec)]
    return [name for group in groups for name in group.layer_names]


def cuts_of(groups: Sequence[Sequence[Any]]) -> list[StateCut] | None:
    """Return the cuts of the states of lane 1's layers, which are by group; None if a layer is of
    an unknown class.
    """
    found = []
    channels = 0 if is_conv_state_dim_first() else 1
    for number, layers in enumerate(groups):
        for layer in layers:
            segments = _segments(layer)
            if segments is None or len(segments) != len(layer.kv_cache):
                return None
            dimensions = (channels, 0)[: len(segments)]
            cuts = zip(dimensions, segments, strict=True)
            found += [StateCut(number, dimension, segment) for dimension, segment in cuts]
    return found


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
