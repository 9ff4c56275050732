"""The VllmConfig of a lane: lane 1's with another degree, and nothing of lane 1's model."""

import copy

from vllm.config import VllmConfig

from flying_serving.vllm_adapter.model_runner.compiled import keep_eager
from flying_serving.vllm_adapter.model_runner.graphs import capture_nothing, limit_capture_sizes


def without_layers(config: VllmConfig) -> VllmConfig:
    """Copy a configuration deeply, without the layers, with weights and KV memory, that vLLM keeps
    in it.
    """
    layers = config.compilation_config.static_forward_context
    copied = copy.deepcopy(config, {id(layers): {}})
    copied.compilation_config.static_all_moe_layers = []
    return copied


def lane_config(
    config: VllmConfig, size: int, block_tokens: int, *, captures: bool = True
) -> VllmConfig:
    """Return the VllmConfig of a lane for groups of `size` engines from lane 1's. Its blocks hold
    `block_tokens` tokens.

    `captures`: False if CUDA graphs cannot hold the lane's exchanges, even if lane 1 has graphs.
    """
    lane = without_layers(config)
    parallel = lane.parallel_config
    parallel.tensor_parallel_size *= size
    parallel.world_size = parallel.tensor_parallel_size
    lane.cache_config.block_size = block_tokens
    lane.cache_config.hash_block_size = None
    keep_eager(lane)
    if captures:
        limit_capture_sizes(lane)
    else:
        capture_nothing(lane)
    return lane
