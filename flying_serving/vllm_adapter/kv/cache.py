"""A lane's KV cache, a view of lane 1's bytes. A group may hold a request that no engine alone can
hold.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)

from flying_serving.log import logger
from flying_serving.memory.kv_groups import KVGroup, KVGroups
from flying_serving.vllm_adapter.assigned import assigned

_FLOATS = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
"""The type of the bytes of a KV cache, by vLLM's name of it."""
_MOST_EXACT = 8
"""The whole numbers up to it, of either sign, are exact in each of these types."""
_buffer: ContextVar[torch.Tensor | None] = ContextVar("buffer", default=None)
_allocate: ContextVar[Callable[[int], torch.Tensor] | None] = ContextVar("allocate", default=None)
_pooled: ContextVar[int] = ContextVar("pooled", default=1)


def shared_kv_buffer(buffer: torch.Tensor) -> AbstractContextManager[None]:
    """While the body runs, a runner that allocates its KV cache gets views of `buffer` (int8,
    bytes).
    """
    return assigned(_buffer, buffer)


def kv_memory_from(allocate: Callable[[int], torch.Tensor]) -> AbstractContextManager[None]:
    """While the body runs, a runner allocates its KV memory through `allocate`: bytes -> int8 of
    that size, zeros.
    """
    return assigned(_allocate, allocate)


def allocate_or_share(
    original: Any,
    kv_cache_config: KVCacheConfig,
    device: torch.device,
    layout: Any,
    kernel_block_sizes: list[int] | None = None,
) -> dict[str, torch.Tensor]:
    """Wrap `allocate_kv_cache`: the same views, over the shared buffer or other memory if there is
    one.
    """
    buffer, allocate = _buffer.get(), _allocate.get()
    if allocate is not None and kv_cache_config.kv_cache_tensors:
        buffer = allocate(kv_cache_config.kv_cache_tensors[0].size)
    if buffer is None:
        result: dict[str, torch.Tensor] = original(
            kv_cache_config, device, layout, kernel_block_sizes
        )
        return result
    specs = layer_specs(kv_cache_config.kv_cache_groups)
    groups = kv_cache_config.kv_cache_groups
    kernel_blocks: Sequence[int | None] = kernel_block_sizes or [None] * len(groups)
    group_of = {name: number for number, group in enumerate(groups) for name in group.layer_names}
    caches: dict[str, torch.Tensor] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        blocks, name = kv_cache_config.num_blocks_of(tensor), tensor.layers[0]
        spec, kernel_block = specs[name], kernel_blocks[group_of[name]]
        views = create_kv_cache_views(
            buffer, spec, blocks, layout, tensor, kernel_block_size=kernel_block
        )
        caches.update(zip(tensor.layers, views, strict=True))
    return caches


def layer_specs(groups: Sequence[KVCacheGroupSpec]) -> dict[str, KVCacheSpec]:
    """Return the spec of each layer of some groups. Layers may differ in size within a group."""
    specs: dict[str, KVCacheSpec] = {}
    for group in groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            specs |= group.kv_cache_spec.kv_cache_specs
        else:
            specs |= dict.fromkeys(group.layer_names, group.kv_cache_spec)
    return specs


def with_sharing_layers(kv: KVCacheConfig, layers: Mapping[str, Any]) -> KVCacheConfig:
    """Return a KV cache in which layers that use the KV of others have a spec, too: that of these.

    vLLM's runner adds such layers to a group, and asks for their specs where layers differ in size.
    `layers`: attention layers by name.
    """
    targets = {
        name: target
        for name, layer in layers.items()
        if (target := getattr(layer, "kv_sharing_target_layer_name", None)) is not None
    }
    groups = []
    for group in kv.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            own = spec.kv_cache_specs
            sharing = {name: own[target] for name, target in targets.items() if target in own}
            spec = replace(spec, kv_cache_specs=own | sharing)
        groups.append(replace(group, kv_cache_spec=spec))
    return replace(kv, kv_cache_groups=groups)


def block_bytes(kv: KVCacheConfig) -> int:
    """Return the bytes of one block, all layers. vLLM gives each tensor the size of all of them."""
    return int(kv.kv_cache_tensors[0].size // kv.num_blocks)


def in_blocks_of(kv: KVCacheConfig, lane1: KVCacheConfig) -> KVCacheConfig | None:
    """Return a lane's KV in the blocks of lane 1, where each layer's part of a block stays its own.

    A lane may not be able to cut the KV of some layers any further. Layers with more KV heads then
    take less of their parts, and leave the rest unused.

    Returns:
        None if a layer does not fit into its part.
    """
    pages, room = _page_bytes(kv), _page_bytes(lane1)
    if pages.keys() != room.keys() or any(pages[name] > room[name] for name in pages):
        return None
    if pages == room:
        return kv if kv.num_blocks == lane1.num_blocks else None
    tensors = copy.deepcopy(lane1.kv_cache_tensors)
    return replace(kv, num_blocks=lane1.num_blocks, kv_cache_tensors=tensors)


def follow_pages(config: VllmConfig, lane1: KVCacheConfig, block_tokens: int) -> None:
    """Let blocks of a lane have the bytes of lane 1's, and `block_tokens` tokens of KV each.

    vLLM may have enlarged lane 1's blocks after lanes were built, so that a state fits into one.
    A state of fewer heads leaves the rest of its page unused.
    """
    cache = config.cache_config
    cache.block_size = block_tokens
    if lane1.has_mamba_layers:
        cache.mamba_page_size_padded = lane1.kv_cache_groups[0].kv_cache_spec.page_size_bytes


def _page_bytes(kv: KVCacheConfig) -> dict[str, int]:
    return {
        name: int(spec.page_size_bytes) for name, spec in layer_specs(kv.kv_cache_groups).items()
    }


def has_kv_alone(kv: KVCacheConfig) -> bool:
    """Return whether all layers are in one group, and none has state."""
    return len(kv.kv_cache_groups) == 1 and not kv.has_mamba_layers


def groups_of(kv: KVCacheConfig) -> KVGroups:
    """Return the groups of a KV cache."""
    specs = [group.kv_cache_spec for group in kv.kv_cache_groups]
    return KVGroups(tuple(KVGroup(spec.block_size, isinstance(spec, MambaSpec)) for spec in specs))


def pooled_capacity(factor: int) -> AbstractContextManager[None]:
    """While the body runs, vLLM's check that one request of --max-model-len fits counts a whole
    group's KV memory.

    `factor`: the tokens that the widest group holds, as a multiple of an engine's.
    """
    return assigned(_pooled, factor)


def check_pooled_memory(
    original: Any,
    available_memory: int,
    get_needed_memory: Callable[[], int],
    max_model_len: int,
    estimate_max_model_len: Callable[[int], int],
) -> None:
    """Wrap `_check_enough_kv_cache_memory`, as `pooled_capacity` says."""
    original(
        available_memory * _pooled.get(), get_needed_memory, max_model_len, estimate_max_model_len
    )


def zero_on_cpu(original: Any, self: KVCacheConfig) -> bool:
    """Wrap `KVCacheConfig.needs_kv_cache_zeroing`: also where the CPU's kernels read behind the
    last token of a request. They multiply what is there by 0, and 0 times NaN is NaN.

    The V2 runner, which is on the CPU in tests alone, would zero with an interpreted kernel.
    """
    is_v1 = not envs.VLLM_USE_V2_MODEL_RUNNER
    return bool(original(self)) or (is_v1 and bool(current_platform.is_cpu()))


def zero_blocks(original: Any, self: Any, block_ids: list[int]) -> None:
    """Wrap `CPUModelRunner._zero_block_ids`: also layers whose KV differs in size, which vLLM
    leaves out.
    """
    original(self, block_ids)
    layers = self.compilation_config.static_forward_context
    for group in self.kv_cache_config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            for name in group.layer_names:
                layers[name].kv_cache[block_ids] = 0


def token_parts(layers: Sequence[Any]) -> list[torch.Tensor] | None:
    """Return views `[blocks, heads, tokens in a block, size]` of attention layers' KV caches, one
    token in each row.

    A backend may lay out a block's bytes as it likes. One of the known ways to read them counts
    only if it finds the values that the backend's own write (`do_kv_cache_update`) puts there.

    Returns:
        the parts of all layers, in their order; None if no known way fits: then tokens cannot be
            read.
    """
    caches = {layer.kv_cache.data_ptr(): layer for layer in layers}.values()  # layers may share one
    latent = any(isinstance(layer, MLAAttention) for layer in caches)
    reads, ways = (
        (_reads_latents, (_latents,)) if latent else (_reads, (_keys_then_values, _keys_transposed))
    )
    for parts_of in ways:
        if all(reads(parts_of, layer) for layer in caches):
            return [part for layer in caches for part in parts_of(layer.kv_cache)]
    return None


def _keys_then_values(cache: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a cache whose rows each have a token's key and its value, as on CUDA."""
    return [cache]


def _keys_transposed(cache: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a cache with keys in the first half of a block, tokens last, as in vLLM's
    CPU kernels.
    """
    blocks, heads, tokens, size = cache.shape
    rows = cache.view(blocks, heads, 2 * tokens, size // 2)
    keys = rows[:, :, :tokens].view(blocks, heads, size // 2, tokens).transpose(2, 3)
    return [keys, rows[:, :, tokens:]]


def _latents(cache: torch.Tensor) -> list[torch.Tensor]:
    """Return the part of a cache `[blocks, tokens, size]` of latent attention: one head."""
    return [cache.unsqueeze(1)]


def _reads_latents(parts_of: Callable[[torch.Tensor], list[torch.Tensor]], layer: Any) -> bool:
    """As `_reads`, for a layer with latent attention (MLA): a token has one vector, of a latent and
    a rotated key.
    """
    if not isinstance(layer, MLAAttention):
        return False
    cache = layer.kv_cache
    scratch = torch.zeros((2, *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
    _, tokens, size = scratch.shape
    rank = layer.kv_lora_rank
    vectors = torch.randn(tokens, size, device=cache.device).to(cache.dtype)
    slot_mapping = torch.arange(tokens, 2 * tokens, device=cache.device)
    layer.impl.do_kv_cache_update(
        vectors[:, :rank],
        vectors[:, None, rank:],
        scratch,
        slot_mapping,
        layer.kv_cache_dtype,
        layer._k_scale,
    )
    return torch.equal(parts_of(scratch)[0][1, 0], vectors)


def _reads(parts_of: Callable[[torch.Tensor], list[torch.Tensor]], layer: Any) -> bool:
    """Return whether `parts_of` finds in some scratch blocks the values that the layer's backend
    writes there.
    """
    cache = layer.kv_cache
    try:
        scratch = torch.zeros((2, *cache.shape[1:]), dtype=cache.dtype, device=cache.device)
        _, heads, tokens, size = scratch.shape
        key, value, stored = _made_up(layer, (2, tokens, heads, size // 2))
        slot_mapping = torch.arange(tokens, 2 * tokens, device=cache.device)
        layer.impl.do_kv_cache_update(layer, key, value, scratch, slot_mapping)
        found = torch.cat([part[1] for part in parts_of(scratch)], dim=-1).transpose(0, 1)
    except Exception:  # any error of a backend: its KV then stays, and prompts are prefilled again
        logger.warning(
            "KV of %s cannot be read, so it will not move", type(layer).__name__, exc_info=True
        )
        return False
    return torch.equal(found, stored)


def _made_up(layer: Any, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return keys and values of a shape (2, tokens, heads, size), and how the layer's cache stores
    them, keys before values.

    In a cache of bytes they are small whole numbers, times the layer's scales: 8 bits hold these
    without rounding.
    """
    cache = layer.kv_cache
    if cache.dtype != torch.uint8:
        key, value = torch.randn(shape, device=cache.device).to(cache.dtype).unbind()
        return key, value, torch.cat([key, value], dim=-1)
    whole = torch.randint(-_MOST_EXACT, _MOST_EXACT + 1, shape, device=cache.device)
    keys, values = whole.to(layer.dtype).unbind()
    stored = torch.cat([keys, values], dim=-1).to(_FLOATS[layer.kv_cache_dtype]).view(torch.uint8)
    return keys * layer._k_scale_float, values * layer._v_scale_float, stored
