"""Views of a device's lanes: one for each kind of layers, with the heads of the rank."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
)

from flying_serving.memory.kv_groups import one_group
from flying_serving.memory.kv_view import KVView
from flying_serving.vllm_adapter.kv.views import AlikeLayers, alike_layers, views_of_lanes

BLOCK = 16
MODEL: Any = SimpleNamespace(use_mla=False)
"""Asked for no heads: each layer has more than one head on its device."""
KINDS = [AlikeLayers(["a", "c"], 8), AlikeLayers(["b"], 2)]


def kv_config(**sizes: tuple[int, int]) -> KVCacheConfig:
    """Layers with some heads of a size."""
    specs: dict[str, KVCacheSpec] = {
        name: FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=heads, head_size=size, dtype=torch.float32
        )
        for name, (heads, size) in sizes.items()
    }
    together = UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs=specs)
    return KVCacheConfig(3, [], [KVCacheGroupSpec(list(specs), together)])


class Readable:
    """KV that can be read, but that of the layers named here."""

    groups = one_group(BLOCK)
    layers: Mapping[str, Any] = {}

    def __init__(self, *unreadable: str) -> None:
        self.unreadable = unreadable

    def parts(self, names: list[str]) -> list[torch.Tensor] | None:
        if set(names) & set(self.unreadable):
            return None
        return [torch.zeros(1) for _ in names]


def lane(rank: int, degree: int, *unreadable: str) -> Any:
    """A lane on a device that is `rank` of `degree`."""
    ranks = SimpleNamespace(rank_in_group=rank, world_size=degree)
    communicators = SimpleNamespace(coordinator=lambda size: ranks)
    return SimpleNamespace(kv=Readable(*unreadable), communicators=communicators, size=degree)


def test_layers_of_one_size_are_one_kind() -> None:
    assert alike_layers(kv_config(a=(2, 32), b=(2, 32)), 2, MODEL) == [AlikeLayers(["a", "b"], 4)]


def test_layers_of_other_heads_are_another_kind() -> None:
    assert alike_layers(kv_config(a=(8, 32), b=(2, 64), c=(8, 32)), 1, MODEL) == KINDS


def test_kinds_with_one_page_size_are_apart() -> None:
    """Heads are counted one by one."""
    kinds = alike_layers(kv_config(a=(4, 32), b=(2, 64)), 1, MODEL)
    assert kinds == [AlikeLayers(["a"], 4), AlikeLayers(["b"], 2)]


def views(lanes: Mapping[int, Any]) -> dict[int, list[KVView]]:
    return views_of_lanes(lanes, kv_config(a=(8, 32), b=(2, 64), c=(8, 32)), KINDS)


def test_each_kind_has_the_heads_of_the_rank() -> None:
    found = views({1: lane(0, 1), 4: lane(3, 4)})
    assert {size: [view.heads for view in views] for size, views in found.items()} == {
        1: [range(8), range(2)],
        4: [range(6, 8), range(1, 2)],
    }
    assert [[len(view.parts) for view in views] for views in found.values()] == [[2, 1], [2, 1]]


def test_lanes_are_not_read_if_a_layer_cannot_be() -> None:
    assert views({1: lane(0, 1), 2: lane(0, 2, "b")}) == {}
