"""The KV memory as one lane has it: the bytes are those of all lanes, the blocks are its own."""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import KVCacheConfig

from flying_serving.errors import ConfigError
from flying_serving.memory.kv_groups import one_group
from flying_serving.vllm_adapter.kv.cache import (
    follow_pages,
    groups_of,
    in_blocks_of,
    shared_kv_buffer,
    token_parts,
    with_sharing_layers,
)
from flying_serving.vllm_adapter.kv.windows import with_all_kv


class LaneKV:
    """The KV of the lane for groups of `size` engines. `runner`: vLLM's, of either version.

    `groups`: of its blocks. `config`: its layers and its blocks. Both are known once KV memory is
    bound.
    """

    def __init__(self, runner: Any, vllm_config: VllmConfig, size: int) -> None:
        self._runner = runner
        self._vllm_config = vllm_config
        self._size = size
        self.groups = one_group(vllm_config.cache_config.block_size)
        self.config: KVCacheConfig | None = None

    @property
    def layers(self) -> dict[str, Any]:
        """The layers with weights or KV memory that vLLM keeps in the configuration, by name."""
        layers: dict[str, Any] = self._vllm_config.compilation_config.static_forward_context
        return layers

    def specs(self) -> dict[str, Any]:
        """Return vLLM's KVCacheSpec of each attention layer, with KV of all tokens."""
        specs: dict[str, Any] = self._runner.get_kv_cache_spec()
        return with_all_kv(specs, self._vllm_config.cache_config.block_size)

    def memory(self) -> torch.Tensor:
        """Return the KV memory, which is one allocation, as int8."""
        cache = self._runner.kv_caches[0]
        return torch.empty(0, dtype=torch.int8, device=cache.device).set_(cache.untyped_storage())

    def take(self, config: KVCacheConfig) -> None:
        """Take over what the runner has been given, as vLLM's worker does it in lane 1."""
        self.config, self.groups = config, groups_of(config)

    def bind(self, memory: torch.Tensor, lane1: KVCacheConfig, block_tokens: int) -> None:
        """Read lane 1's KV memory (int8, bytes) as this lane's blocks, of `block_tokens` tokens,
        with the lane's group active.

        Raises:
            ConfigError: if a block would not keep its bytes.
        """
        cache = self._vllm_config.cache_config
        cache.kv_cache_layout = lane1.kv_cache_layout
        follow_pages(self._vllm_config, lane1, block_tokens)
        with set_current_vllm_config(self._vllm_config), shared_kv_buffer(memory):
            kv = self._in_blocks_of(lane1, memory.numel())
            cache.num_gpu_blocks = kv.num_blocks
            self.take(kv)
            self._runner.initialize_kv_cache(self.with_sharing_layers(kv))
        # as vLLM's worker does for lane 1: a new block of KV may have been one of a state
        if kv.needs_kv_cache_zeroing and hasattr(self._runner, "_init_kv_zero_meta"):
            self._runner._init_kv_zero_meta()

    def _in_blocks_of(self, lane1: KVCacheConfig, size_bytes: int) -> KVCacheConfig:
        """Return the lane's use of this much KV memory, in the blocks of lane 1."""
        own = get_kv_cache_configs(self._vllm_config, [self.specs()], [size_bytes])[0]
        kv = in_blocks_of(own, lane1)
        layers, expected = (
            [group.layer_names for group in config.kv_cache_groups] for config in (own, lane1)
        )
        if kv is None or layers != expected:
            raise ConfigError(
                f"group size {self._size}: {own.num_blocks} KV blocks in {len(layers)} cache "
                f"groups, {lane1.num_blocks} in the {len(expected)} groups of lane 1 are "
                "needed for blocks of constant bytes"
            )
        kv.kv_cache_layout = lane1.kv_cache_layout
        return kv

    def with_sharing_layers(self, kv: KVCacheConfig) -> KVCacheConfig:
        """Return a KV cache as the runner takes it: see `kv/cache.py`."""
        return with_sharing_layers(kv, self.layers)

    def parts(self, names: Sequence[str]) -> list[torch.Tensor] | None:
        """Return `token_parts` of layers whose KV has one size; None if it cannot be read."""
        return token_parts([self.layers[name] for name in names])
