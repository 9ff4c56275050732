"""Blocks are zeroed when a request gets them, where kernels read behind a request's last token."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from flying_serving.vllm_adapter.kv.cache import zero_blocks, zero_on_cpu
from flying_serving.vllm_adapter.patches import installer, table
from tests.with_vllm.vllm_adapter.kv_configs import of_one_layer
from tests.with_vllm.vllm_adapter.kv_lanes import BLOCK, KVLane, make

BLOCKS = 7
STALE = -1
"""What another request has left, in the memory of `KVLane`."""


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize("runner", [None, "0", "1"])
def test_new_blocks_are_zeroed_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, platform: str, runner: str | None
) -> None:
    monkeypatch.setattr(current_platform, "is_cpu", lambda: platform == "cpu")
    if runner is not None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    config = of_one_layer(BLOCKS, 16)
    for of_stock in (False, True):
        found = zero_on_cpu(lambda _, is_needed=of_stock: is_needed, config)
        assert found is (of_stock or (platform == "cpu" and runner != "1"))


@pytest.mark.parametrize("sizes", [(32, 32), (32, 64)], ids=["alike", "of two sizes"])
def test_blocks_of_layers_of_every_size_are_zeroed_on_the_cpu(sizes: tuple[int, int]) -> None:
    layers = {
        name: FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=size, dtype=torch.float32)
        for name, size in zip("ab", sizes, strict=True)
    }
    spec = UniformTypeKVCacheSpecs.from_specs(layers) if len(set(sizes)) > 1 else layers["a"]
    assert spec is not None
    caches = {
        name: torch.full((BLOCKS, 2, 16, 2 * layer.head_size), torch.nan)
        for name, layer in layers.items()
    }
    runner: Any = SimpleNamespace(
        kv_cache_config=KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(list("ab"), spec)]),
        compilation_config=SimpleNamespace(
            static_forward_context={
                name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()
            }
        ),
    )
    zero_blocks(CPUModelRunner._zero_block_ids, runner, [1, 4])
    for cache in caches.values():
        zeroed = [number for number, block in enumerate(cache) if not block.any()]
        assert zeroed == [1, 4]
        assert int(cache.isnan().all(dim=(1, 2, 3)).sum()) == BLOCKS - 2


@pytest.fixture
def zeroing() -> Iterator[None]:
    """Schedulers say which blocks are to be zeroed."""
    name = "KVCacheConfig.needs_kv_cache_zeroing"
    installer.uninstall()
    installer.apply(tuple(patch for patch in table.PATCHES if name in patch.original))
    yield
    installer.uninstall()


@pytest.mark.usefixtures("zeroing")
@pytest.mark.parametrize("arrived", [5, 8, 12, 13])
def test_kv_that_comes_is_kept_and_what_is_behind_it_is_zeroed(
    overlaps: bool, arrived: int
) -> None:
    """Beside a request that is computed, whose new blocks are zeroed too."""
    lane = KVLane(overlaps=overlaps)
    lane.scheduler.add_request(make("other", 5, 6, 20))
    lane.step()
    coming = make("a", 3, 10, 6, had=4)
    room = lane.pool.prepare(coming, 5)
    assert room is not None
    lane.write(3, room[1], range(5))
    lane.step()
    blocks = lane.pool.extend(coming, 13, next_token=True)
    assert blocks is not None
    lane.write(3, blocks, range(arrived))
    lane.step()
    lane.settle()
    assert lane.has(3, blocks, range(arrived))
    lane.pool.arrived(coming, arrived)
    lane.scheduler.add_request(coming)
    for _ in range(3):
        lane.step()
    lane.settle()
    assert lane.has(3, blocks, range(coming.num_tokens - 1))
    for name in ("a", "other"):
        whole = [
            block
            for block in lane.pool.blocks_of(name)
            if block not in blocks[: -(-arrived // BLOCK)]
        ]
        assert STALE not in [value for block in whole for value in lane.kv[BLOCK * block :][:BLOCK]]


@pytest.mark.usefixtures("zeroing")
def test_blocks_of_a_request_that_has_gone_are_not_zeroed_in_use() -> None:
    """It has come with KV, and ends before it has made a step; its blocks are another one's."""
    lane = KVLane(overlaps=False, blocks=6)
    gone, coming = make("gone", 3, 10, 6, had=4), make("a", 5, 10, 6, had=4)
    assert lane.pool.prepare(gone, 13) is not None
    lane.pool.arrived(gone, 5)
    lane.scheduler.add_request(gone)
    lane.abort("gone")
    room = lane.pool.prepare(coming, 13)
    assert room is not None
    lane.write(5, room[1], range(13))
    lane.step()
    assert lane.has(5, room[1], range(13))
