"""The KV of a device's lanes, token by token: a view for each kind of layers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from flying_serving.memory.kv_view import KVView, heads_of
from flying_serving.memory.states import StateCut
from flying_serving.vllm_adapter.kv.cache import groups_of, layer_specs
from flying_serving.vllm_adapter.kv.heads import kv_heads_of
from flying_serving.vllm_adapter.model_runner.runner import Runner
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


@dataclass(frozen=True)
class LaneKV:
    """A lane on a device that is `rank` of `degree`, and its KV."""

    runner: Runner
    kv: KVCacheConfig
    rank: int
    degree: int

    def views(
        self, kinds: Iterable[AlikeLayers], cuts: Sequence[StateCut] = ()
    ) -> list[KVView] | None:
        """Return a view for each kind of layers; None if one cannot be read, or there is none. The
        first view has the states of all layers; `cuts`: of these.
        """
        block_tokens = groups_of(self.kv).block_tokens
        beside = states_of(self.kv, self.runner.layers), cuts
        views: list[KVView] = []
        for layers in kinds:
            parts = self.runner.kv_parts(layers.names)
            if parts is None:
                return None
            heads = heads_of(self.rank, self.degree, layers.kv_heads)
            views.append(KVView(parts, heads, block_tokens, layers.kv_heads, *beside))
            beside = [], ()
        return views or None


def views_of_lanes(
    lanes: Mapping[int, LaneKV], kinds: Sequence[AlikeLayers]
) -> dict[int, list[KVView]]:
    """Return the views of all lanes by group size; nothing if one cannot be read, or parted."""
    cuts = cuts_of(lanes[1].kv, lanes[1].runner.layers)
    found = {
        size: None if cuts is None else lane.views(kinds, cuts) for size, lane in lanes.items()
    }
    readable = {size: views for size, views in found.items() if views is not None}
    return readable if len(readable) == len(found) else {}
