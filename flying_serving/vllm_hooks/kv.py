"""A lane's KV cache is a view of lane 1's bytes, and a group may hold what no engine alone can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, create_kv_cache_views

_buffer: ContextVar[torch.Tensor | None] = ContextVar("buffer", default=None)
_pooled: ContextVar[int] = ContextVar("pooled", default=1)


@contextmanager
def shared_kv_buffer(buffer: torch.Tensor) -> Iterator[None]:
    """While the body runs, a runner that allocates its KV cache gets views of `buffer` (int8, bytes)."""
    token = _buffer.set(buffer)
    try:
        yield
    finally:
        _buffer.reset(token)


def allocate_or_share(
    original: Any,
    kv_cache_config: KVCacheConfig,
    device: torch.device,
    layout: Any,
    kernel_block_sizes: list[int] | None = None,
) -> dict[str, torch.Tensor]:
    """Wraps `allocate_kv_cache`: the same views, over the shared buffer if there is one."""
    buffer = _buffer.get()
    if buffer is None:
        result: dict[str, torch.Tensor] = original(kv_cache_config, device, layout, kernel_block_sizes)
        return result
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    kernel_block = kernel_block_sizes[0] if kernel_block_sizes else None
    caches: dict[str, torch.Tensor] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        blocks = kv_cache_config.num_blocks_of(tensor)
        views = create_kv_cache_views(buffer, spec, blocks, layout, tensor, kernel_block_size=kernel_block)
        caches.update(zip(tensor.layers, views, strict=True))
    return caches


@contextmanager
def pooled_capacity(factor: int) -> Iterator[None]:
    """While the body runs, vLLM's check that one request of --max-model-len fits counts a whole group's KV memory.

    Args:
        factor: how many times an engine's tokens the widest group holds.
    """
    token = _pooled.set(factor)
    try:
        yield
    finally:
        _pooled.reset(token)


def check_pooled_memory(
    original: Any,
    available_memory: int,
    get_needed_memory: Callable[[], int],
    max_model_len: int,
    estimate_max_model_len: Callable[[int], int],
) -> None:
    """Wraps `_check_enough_kv_cache_memory`: see `pooled_capacity`."""
    original(available_memory * _pooled.get(), get_needed_memory, max_model_len, estimate_max_model_len)
