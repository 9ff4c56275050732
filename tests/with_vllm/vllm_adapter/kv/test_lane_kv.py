"""A lane's KV in lane 1's memory: blocks of the same bytes hold more tokens, or it is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from flying_serving.errors import ConfigError
from flying_serving.vllm_adapter.kv.lane_kv import LaneKV
from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from tests.with_vllm.worker.configurations import LLAMA, configuration

BLOCK, HEADS, BLOCKS = 16, 8, 40
LAYERS, LAYOUT = ("a", "b"), "LBHNC"


class Asked:
    """The part of vLLM's runner that has KV: its layers need so many heads."""

    def __init__(self, heads: int, block_tokens: int) -> None:
        spec = FullAttentionSpec(
            block_size=block_tokens, num_kv_heads=heads, head_size=8, dtype=torch.float32
        )
        self._specs = dict.fromkeys(LAYERS, spec)
        self.bound: list[KVCacheConfig] = []

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return self._specs

    def initialize_kv_cache(self, kv: KVCacheConfig) -> None:
        self.bound.append(kv)


@pytest.fixture
def lane1(tmp_path: Path) -> tuple[VllmConfig, KVCacheConfig, int]:
    """Lane 1's configuration, its KV, and the bytes of that."""
    config = configuration(tmp_path, LLAMA)
    config.cache_config.block_size, config.cache_config.kv_cache_layout = BLOCK, LAYOUT
    specs = Asked(HEADS, BLOCK).get_kv_cache_spec()
    size_bytes = BLOCKS * sum(spec.page_size_bytes for spec in specs.values())
    kv = get_kv_cache_configs(config, [specs], [size_bytes])[0]
    kv.kv_cache_layout = LAYOUT
    return config, kv, size_bytes


def test_blocks_of_a_group_hold_more_tokens_in_the_same_bytes(
    lane1: tuple[VllmConfig, KVCacheConfig, int],
) -> None:
    config, of_lane1, size_bytes = lane1
    runner, lane = Asked(HEADS // 2, 2 * BLOCK), lane_config(config, 2, 2 * BLOCK)
    kv = LaneKV(runner, lane, 2)
    kv.bind(torch.zeros(size_bytes, dtype=torch.int8), of_lane1, 2 * BLOCK)
    assert of_lane1.num_blocks == lane.cache_config.num_gpu_blocks == BLOCKS
    assert kv.groups.block_tokens == 2 * BLOCK
    assert runner.bound == [kv.config]


def test_layers_that_keep_their_heads_are_refused(
    lane1: tuple[VllmConfig, KVCacheConfig, int],
) -> None:
    """Blocks of twice the tokens would have twice the bytes."""
    config, of_lane1, size_bytes = lane1
    runner = Asked(HEADS, 2 * BLOCK)
    kv = LaneKV(runner, lane_config(config, 2, 2 * BLOCK), 2)
    says = r"^group size 2: 20 KV blocks in 1 cache groups, 40 in the 1 groups of lane 1 are needed"
    with pytest.raises(ConfigError, match=says):
        kv.bind(torch.zeros(size_bytes, dtype=torch.int8), of_lane1, 2 * BLOCK)
    assert runner.bound == []
