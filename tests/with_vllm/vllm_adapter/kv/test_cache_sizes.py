"""KV memory of layers whose KV differs in size: a lane reads lane 1's blocks, layer by layer."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from flying_serving.layout.shards import lane_block_tokens
from flying_serving.vllm_adapter.kv.cache import (
    allocate_or_share,
    block_bytes,
    in_blocks_of,
    kv_memory_from,
    layer_specs,
    shared_kv_buffer,
    with_sharing_layers,
)
from tests.with_vllm.vllm_adapter.kv_configs import laid_out

BLOCKS, BLOCK = 5, 16
LAYOUTS = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
LOCAL, FULL = ("layer0", "layer1", "layer3"), ("layer2", "layer4")
"""Layers with a window, and with larger heads, as in Gemma 4."""
CPU = torch.device("cpu")


def kv_config(
    layout: KVCacheLayout, heads: tuple[int, int], block: int, memory_bytes: int | None = None
) -> KVCacheConfig:
    """What vLLM makes of layers with these KV heads on a device, in BLOCKS blocks by default."""
    local, full = (
        FullAttentionSpec(block_size=block, num_kv_heads=count, head_size=size, dtype=torch.float32)
        for count, size in zip(heads, (32, 64), strict=True)
    )
    specs: dict[str, KVCacheSpec] = {
        name: local if name in LOCAL else full for name in sorted((*LOCAL, *FULL))
    }
    together = UniformTypeKVCacheSpecs(block_size=block, kv_cache_specs=specs)
    memory_bytes = memory_bytes or BLOCKS * together.page_size_bytes
    return laid_out(layout, [KVCacheGroupSpec(list(specs), together)], memory_bytes)


def lane_of(layout: KVCacheLayout, heads: tuple[int, int], size: int) -> KVCacheConfig | None:
    """A lane of a model with these heads in the blocks of lane 1."""
    lane1 = kv_config(layout, heads, BLOCK)
    there = tuple(max(1, count // size) for count in heads)
    tokens = lane_block_tokens(BLOCK, size, 1, min(heads))
    own = kv_config(layout, (there[0], there[1]), tokens, lane1.kv_cache_tensors[0].size)
    return in_blocks_of(own, lane1)


def test_layers_have_the_specs_of_their_group() -> None:
    specs = layer_specs(kv_config(LAYOUTS[0], (4, 2), BLOCK).kv_cache_groups)
    assert [name for name, spec in specs.items() if spec == specs["layer0"]] == list(LOCAL)
    assert [name for name, spec in specs.items() if spec == specs["layer2"]] == list(FULL)


def test_layers_that_use_the_kv_of_others_have_their_specs() -> None:
    kv = kv_config(LAYOUTS[0], (4, 2), BLOCK)
    layers = {name: SimpleNamespace(kv_sharing_target_layer_name=None) for name in (*LOCAL, *FULL)}
    layers["layer5"] = SimpleNamespace(kv_sharing_target_layer_name="layer4")
    layers["layer6"] = SimpleNamespace(kv_sharing_target_layer_name="layer3")
    before = layer_specs(kv.kv_cache_groups)
    after = layer_specs(with_sharing_layers(kv, layers).kv_cache_groups)
    assert after == before | {"layer5": before["layer4"], "layer6": before["layer3"]}
    assert layer_specs(kv.kv_cache_groups) == before


def test_a_block_has_the_bytes_of_all_layers() -> None:
    kv = kv_config(LAYOUTS[0], (4, 1), BLOCK)
    assert len(kv.kv_cache_tensors) == 2
    assert block_bytes(kv) == BLOCK * 4 * 2 * (3 * 4 * 32 + 2 * 64)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_memory_from_outside_has_vllms_views(layout: KVCacheLayout) -> None:
    kv = kv_config(layout, (4, 4), BLOCK)
    own = allocate_kv_cache(kv, CPU, layout)
    with kv_memory_from(lambda size_bytes: torch.zeros(size_bytes, dtype=torch.int8)):
        found = allocate_or_share(allocate_kv_cache, kv, CPU, layout)
    assert found.keys() == own.keys()
    for name, view in own.items():
        assert found[name].shape == view.shape
        assert found[name].stride() == view.stride()
        assert found[name].storage_offset() == view.storage_offset()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize(
    ("heads", "size", "part"),
    [((4, 4), 2, 1.0), ((8, 2), 2, 1.0), ((8, 2), 4, 0.5), ((4, 1), 4, 0.25), ((1, 1), 4, 1.0)],
    ids=str,
)
def test_blocks_of_a_lane_are_those_of_lane_1(
    layout: KVCacheLayout, heads: tuple[int, int], size: int, part: float
) -> None:
    """In each layer. Layers with more heads use a part of theirs."""
    lane1 = kv_config(layout, heads, BLOCK)
    caches = allocate_kv_cache(lane1, CPU, layout)
    memory = torch.empty(0, dtype=torch.int8).set_(caches["layer0"].untyped_storage())
    kv = lane_of(layout, heads, size)
    assert kv is not None
    assert kv.num_blocks == BLOCKS
    with shared_kv_buffer(memory):
        lane = allocate_or_share(allocate_kv_cache, kv, CPU, layout)
    for name, cache in lane.items():
        for block in range(BLOCKS):
            memory.zero_()
            cache[block] = 1.0
            used = {layer: int(view.count_nonzero()) for layer, view in caches.items()}
            share = part if name in LOCAL else 1.0
            assert used.pop(name) == int(caches[name][block].numel() * share)
            assert caches[name][block].count_nonzero() == cache[block].numel()
            assert not any(used.values())


def test_layer_that_does_not_fit_into_its_part_is_told() -> None:
    """Its heads replicate, and a block would have twice their tokens."""
    lane1 = kv_config(LAYOUTS[0], (4, 1), BLOCK)
    lane = kv_config(LAYOUTS[0], (2, 1), 2 * BLOCK, lane1.kv_cache_tensors[0].size)
    assert in_blocks_of(lane, lane1) is None


def test_other_number_of_blocks_is_told() -> None:
    lane1, lane = (kv_config(LAYOUTS[0], (4, 2), BLOCK, blocks << 20) for blocks in (1, 2))
    assert in_blocks_of(lane, lane1) is None
