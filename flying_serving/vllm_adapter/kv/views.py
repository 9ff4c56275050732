"""The KV of a device's lanes, token by token: a view for each kind of layers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from vllm.v1.kv_cache_interface import KVCacheConfig

from flying_serving.memory.kv_view import KVView, heads_of
from flying_serving.memory.states import StateCut
from flying_serving.vllm_adapter.kv.cache import layer_specs
from flying_serving.vllm_adapter.kv.heads import kv_heads_of
from flying_serving.vllm_adapter.model_runner.device_lane import DeviceLane
from flying_serving.vllm_adapter.recurrent.layers import cuts_of, groups_with_kv, states_of


@dataclass(frozen=True)
class AlikeLayers:
    """Layers whose KV has the same size and the same heads. `kv_heads`: of a layer, on all ranks
    together.
    """

    names: Sequence[str]
    kv_heads: int


def alike_layers(lane1: KVCacheConfig, devices: int, model: Any) -> list[AlikeLayers]:
    """Return the kinds of layers by their KV in lane 1 of an engine with `devices`.

    An empty list where layers with KV are several groups. `model`: vLLM's ModelConfig.
    """
    paged = groups_with_kv(lane1)
    kinds: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, found in layer_specs(paged).items() if len(paged) == 1 else ():
        spec: Any = found
        kv_heads = kv_heads_of(name, spec.num_kv_heads, devices, model)
        kinds[kv_heads, spec.head_size, spec.head_size_v, spec.dtype].append(name)
    return [AlikeLayers(names, kv_heads) for (kv_heads, *_), names in kinds.items()]


def views_of(
    lane: DeviceLane,
    kinds: Iterable[AlikeLayers],
    beside: tuple[Sequence[Tensor], Sequence[StateCut]],
) -> list[KVView] | None:
    """Return a lane's view for each kind of layers; None if one cannot be read, or there is none.
    `beside`: the states of all layers, which the first view has, and their cuts.
    """
    kv, ranks = lane.kv, lane.communicators.coordinator(lane.size)
    views: list[KVView] = []
    for layers in kinds:
        parts = kv.parts(layers.names)
        if parts is None:
            return None
        heads = heads_of(ranks.rank_in_group, ranks.world_size, layers.kv_heads)
        views.append(KVView(parts, heads, kv.groups.block_tokens, layers.kv_heads, *beside))
        beside = [], ()
    return views or None


def views_of_lanes(
    lanes: Mapping[int, DeviceLane], lane1: KVCacheConfig, kinds: Sequence[AlikeLayers]
) -> dict[int, list[KVView]]:
    """Return the views of all lanes by group size; nothing if one cannot be read, or parted.
    `lane1`: its KV cache. Those of others have the same layers.
    """
    cuts = cuts_of(lane1, lanes[1].kv.layers)
    if cuts is None:
        return {}
    found = {
        size: views_of(lane, kinds, (states_of(lane1, lane.kv.layers), cuts))
        for size, lane in lanes.items()
    }
    readable = {size: views for size, views in found.items() if views is not None}
    return readable if len(readable) == len(found) else {}
