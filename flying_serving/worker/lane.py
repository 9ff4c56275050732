"""A lane on a worker: a model runner of one degree over the engine's shared weights and KV bytes (design section 3)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, UniformTypeKVCacheSpecs

from flying_serving.comm.pool import CommunicatorPool
from flying_serving.errors import ConfigError, Unsupported
from flying_serving.vllm_adapter.kv import shared_kv_buffer
from flying_serving.vllm_adapter.loading import dummy_run
from flying_serving.vllm_adapter.trees import module_tree

WARM_TOKENS = 16
MakeRunner = Callable[[VllmConfig], Any]


def without_layers(config: VllmConfig) -> VllmConfig:
    """A deep copy but for the layers, with weights and KV memory, that vLLM keeps in the configuration."""
    layers = config.compilation_config.static_forward_context
    copied = copy.deepcopy(config, {id(layers): {}})
    copied.compilation_config.static_all_moe_layers = []
    return copied


def lane_config(config: VllmConfig, size: int, block_tokens: int) -> VllmConfig:
    """The VllmConfig of a lane for groups of `size` engines, from lane 1's.

    Args:
        config: lane 1's.
        size: engines in the group.
        block_tokens: tokens that one block holds in this lane.
    """
    lane = without_layers(config)
    parallel = lane.parallel_config
    parallel.tensor_parallel_size *= size
    parallel.world_size = parallel.tensor_parallel_size
    lane.cache_config.block_size = block_tokens
    lane.cache_config.hash_block_size = None
    lane.scheduler_config.async_scheduling = False
    return lane


@dataclass
class Lane:
    """What one worker needs to step in groups of `size` engines."""

    size: int
    config: VllmConfig
    pool: CommunicatorPool
    runner: Any
    random_state: torch.Tensor
    """State of torch's generator inside this lane: equal on all members, untouched by what they do elsewhere."""
    kv_config: KVCacheConfig | None = None

    @classmethod
    def build(cls, size: int, config: VllmConfig, pool: CommunicatorPool, make_runner: MakeRunner) -> Lane:
        """A lane with its runner and the module tree of its degree, its parameters still on the meta device.

        See `module_tree`.
        """
        with pool.activate(size), set_current_vllm_config(config):
            runner = make_runner(config)
            runner.model = module_tree(config, torch.device(runner.device))
        seed = torch.Generator().manual_seed(config.model_config.seed or 0).get_state()
        return cls(size, config, pool, runner, seed)

    def bind_kv(self, buffer: torch.Tensor, lane1: KVCacheConfig) -> None:
        """Read lane 1's KV bytes as this lane's blocks.

        Args:
            buffer: lane 1's KV memory, int8 (bytes).
            lane1: lane 1's KV configuration.

        Raises:
            ConfigError: if a block would not keep its bytes, or layers' KV differs in size (Gemma 4).
        """
        self.config.cache_config.kv_cache_layout = lane1.kv_cache_layout
        with self.pool.activate(self.size), set_current_vllm_config(self.config):
            kv = get_kv_cache_configs(self.config, [self.runner.get_kv_cache_spec()], [buffer.numel()])[0]
            if any(isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) for group in kv.kv_cache_groups):
                raise Unsupported("--model: layers whose KV differs in size cannot be served by Flying Serving yet")
            kv.kv_cache_layout = lane1.kv_cache_layout
            if kv.num_blocks != lane1.num_blocks or len(kv.kv_cache_groups) != 1:
                raise ConfigError(
                    f"group size {self.size}: {kv.num_blocks} KV blocks in {len(kv.kv_cache_groups)} cache groups, "
                    f"{lane1.num_blocks} in one cache group are needed for blocks of constant bytes"
                )
            _refuse_dropped_kv(kv, self.config.model_config.max_model_len)
            self.config.cache_config.num_gpu_blocks = kv.num_blocks
            with shared_kv_buffer(buffer):
                self.runner.initialize_kv_cache(kv)
        self.kv_config = kv

    def warm(self) -> None:
        """Run the model once on a few made-up tokens, so that no request pays for what is built at first use."""
        with self.pool.activate(self.size), set_current_vllm_config(self.config):
            dummy_run(self.runner, min(WARM_TOKENS, self.config.scheduler_config.max_num_batched_tokens))

    def execute(self, plan: Any, grammar: Any) -> Any:
        """One step of the model, all members together. Returns vLLM's ModelRunnerOutput."""
        outside = torch.random.get_rng_state()
        torch.random.set_rng_state(self.random_state)
        try:
            with self.pool.activate(self.size):
                return run_step(self.runner, plan, grammar)
        finally:
            self.random_state = torch.random.get_rng_state()
            torch.random.set_rng_state(outside)


def refuse_not_causal(specs: Iterable[KVCacheSpec], architecture: str) -> None:
    """Raise Unsupported if prompt tokens see later ones: what a moved request has given out is computed as its prompt.

    vLLM serves such models without chunked prefill, and never schedules a prompt that is longer than a step.
    """
    if any(getattr(spec, "non_causal", False) for spec in specs):
        raise Unsupported(
            f"--model: models with attention that is not causal ({architecture}) cannot be served by Flying Serving yet"
        )


def _refuse_dropped_kv(kv: KVCacheConfig, max_model_len: int) -> None:
    """Raise ConfigError if vLLM would give blocks back while their request runs: members would not know."""
    spec = kv.kv_cache_groups[0].kv_cache_spec
    window = None if isinstance(spec, FullAttentionSpec) else getattr(spec, "sliding_window", None)
    if window is not None and window < max_model_len:
        raise ConfigError(
            f"--max-model-len={max_model_len}: every layer has a sliding window of {window} tokens; "
            f"at most {window} can be served by Flying Serving yet"
        )


def run_step(runner: Any, plan: Any, grammar: Any) -> Any:
    """One step of a model runner, sampling included. Returns vLLM's ModelRunnerOutput, once it is there."""
    output = runner.execute_model(plan)
    if output is None:
        output = runner.sample_tokens(grammar)
    return output.get_output() if hasattr(output, "get_output") else output
