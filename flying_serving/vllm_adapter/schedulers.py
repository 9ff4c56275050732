"""vLLM's scheduler for a lane, beside the one that vLLM's engine makes for itself."""

from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    resolve_kv_cache_block_sizes,
)


def make_scheduler(core: Any, config: Any, kv_config: Any) -> Any:
    """A scheduler as vLLM's EngineCore `core` makes its own, with the VllmConfig and KV configuration of a lane."""
    block_tokens, hash_block_tokens = resolve_kv_cache_block_sizes(kv_config, config)
    return config.scheduler_config.get_scheduler_cls()(
        vllm_config=config,
        kv_cache_config=generate_scheduler_kv_cache_config([kv_config]),
        structured_output_manager=core.structured_output_manager,
        log_stats=core.log_stats,
        block_size=block_tokens,
        hash_block_size=hash_block_tokens,
    )


def hash_blocks(config: Any, kv_config: Any) -> Any:
    """What hashes the blocks of a request for a lane's prefix cache, once the engine has prefix caching."""
    _, hash_block_tokens = resolve_kv_cache_block_sizes(kv_config, config)
    return get_request_block_hasher(
        hash_block_tokens, get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    )
