"""KV memory of lanes: the same bytes in all of them, counted for a group, and its tokens one in
each row.
"""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from flying_serving.vllm_adapter.kv.cache import (
    allocate_or_share,
    check_pooled_memory,
    kv_memory_from,
    pooled_capacity,
    shared_kv_buffer,
    token_parts,
)
from tests.with_vllm.vllm_adapter.kv_configs import laid_out

BLOCKS, LAYERS = 7, 3
NAMES = [f"layer{number}" for number in range(LAYERS)]
LAYOUTS = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
"""A layer's blocks side by side, and a block's layers."""
Write = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def kv_config(
    layout: KVCacheLayout, block: int, heads: int, size: int, dtype: torch.dtype
) -> KVCacheConfig:
    """What vLLM makes of a model of three equal layers."""
    spec = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=size, dtype=dtype)
    memory_bytes = BLOCKS * LAYERS * spec.page_size_bytes
    return laid_out(layout, [KVCacheGroupSpec(list(NAMES), spec)], memory_bytes)


def caches(
    layout: KVCacheLayout,
    block: int = 16,
    heads: int = 2,
    size: int = 32,
    dtype: torch.dtype = torch.float32,
    kernel_block: int | None = None,
) -> list[torch.Tensor]:
    """The layers' caches as vLLM allocates them."""
    kernel_blocks = None if kernel_block is None else [kernel_block]
    made = allocate_kv_cache(
        kv_config(layout, block, heads, size, dtype), torch.device("cpu"), layout, kernel_blocks
    )
    return [made[name] for name in NAMES]


# ---- how backends write


def on_cpu(
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """What vLLM's CPUAttentionBackendImpl does, with its own kernel."""
    blocks, heads, tokens, _ = cache.size()
    key_cache, value_cache = cache.view((blocks, heads, tokens * 2, -1)).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, layer.isa)


def in_8_bits(
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """What vLLM's CPUAttentionBackendImpl does with `--kv-cache-dtype fp8`."""
    blocks, heads, tokens, _ = cache.size()
    key_cache, value_cache = cache.view((blocks, heads, tokens * 2, -1)).chunk(2, dim=2)
    scales = layer._k_scale_float, layer._v_scale_float
    ops.cpu_attn_reshape_and_cache(
        key, value, key_cache, value_cache, slot_mapping, layer.isa, *scales, layer.kv_cache_dtype
    )


def plain_in_8_bits(
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """A token's key, then its value, each divided by its scale and rounded to 8 bits."""
    stored = torch.float8_e5m2 if layer.kv_cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn
    parts = (key / layer._k_scale_float, value / layer._v_scale_float)
    plain(layer, *(part.to(stored).view(torch.uint8) for part in parts), cache, slot_mapping)


WRITERS_OF_8_BITS = [plain_in_8_bits, *([in_8_bits] if torch.cpu._is_avx512_supported() else [])]
"""vLLM's kernels have 8 bits on processors with AVX-512."""


def plain(
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """A token's key, then its value, as on CUDA."""
    cache[slot_mapping // cache.shape[2], :, slot_mapping % cache.shape[2]] = torch.cat(
        [key, value], dim=-1
    )


def backwards(layer: Any, key: torch.Tensor, value: torch.Tensor, *rest: torch.Tensor) -> None:
    """A token's value, then its key: as no backend that is known."""
    plain(layer, value, key, *rest)


def quantized(layer: Any, key: torch.Tensor, value: torch.Tensor, *rest: torch.Tensor) -> None:
    """In the right place, but not what was to be written."""
    plain(layer, key / 2, value / 2, *rest)


def refusing(*_: Any) -> None:
    """A backend that cannot do it this way."""
    raise NotImplementedError("latent attention has no keys")


class Layer(SimpleNamespace):
    """An attention layer whose backend writes its cache in some way."""

    def __init__(
        self,
        cache: torch.Tensor,
        write: Write,
        isa: str = "",
        named: str = "auto",
        scale: float = 1.0,
    ) -> None:
        super().__init__(kv_cache=cache, impl=SimpleNamespace(do_kv_cache_update=write), isa=isa)
        self.dtype, self.kv_cache_dtype = torch.float32, named
        self._k_scale_float = self._v_scale_float = scale

    def update(self, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Write tokens where the slot mapping says, as in a step."""
        self.impl.do_kv_cache_update(self, key, value, self.kv_cache, slot_mapping)


def check_rows(layers: list[Layer], each: int, block: int, heads: int, size: int) -> None:
    """Tokens that backends wrote are found in the parts, and nothing else changes."""
    parts = token_parts(layers)
    assert parts is not None
    assert len(parts) == each * len(layers)
    slot_mapping = torch.tensor([block, 3 * block + 1, 5 * block - 1, (BLOCKS - 1) * block + 2])
    for number, layer in enumerate(layers):
        before = [part.clone() for part in parts]
        key, value = (
            torch.randn(2, len(slot_mapping), heads, size).to(layer.kv_cache.dtype).unbind()
        )
        layer.update(key, value, slot_mapping)
        expected = torch.cat([key, value], dim=-1).chunk(each, dim=-1)
        for part, was, rows in zip(
            parts[each * number :][:each], before[each * number :][:each], expected, strict=True
        ):
            inner = part.shape[2]
            assert torch.equal(part[slot_mapping // inner, :, slot_mapping % inner], rows)
            was[slot_mapping // inner, :, slot_mapping % inner] = rows
        assert all(torch.equal(part, was) for part, was in zip(parts, before, strict=True))


# ---- tokens


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("isa", "block", "heads", "size"),
    [("vec", 32, 2, 64), ("vec", 64, 1, 32), ("vec16", 16, 3, 80), ("vec16", 48, 1, 32)],
)
def test_tokens_are_read_as_the_cpu_kernel_writes_them(
    layout: KVCacheLayout, dtype: torch.dtype, isa: str, block: int, heads: int, size: int
) -> None:
    """Keys of a block lie transposed, whatever the distance to the next block is."""
    layers = [Layer(cache, on_cpu, isa) for cache in caches(layout, block, heads, size, dtype)]
    assert layers[0].kv_cache.is_contiguous() == layout.is_layer_compact
    check_rows(layers, 2, block, heads, size)


def test_tokens_are_read_where_the_kernel_sees_smaller_blocks() -> None:
    """Slots count in either."""
    made = caches(KVCacheLayout.LBHNC, block=64, kernel_block=32)
    assert made[0].shape == (2 * BLOCKS, 2, 32, 64)
    check_rows([Layer(cache, on_cpu, "vec") for cache in made], 2, 64, 2, 32)


@pytest.mark.parametrize(
    ("named", "stored"),
    [
        ("fp8", torch.float8_e4m3fn),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.375])
@pytest.mark.parametrize("write", WRITERS_OF_8_BITS)
def test_tokens_of_8_bits_are_read_as_they_are_written(
    write: Write, named: str, stored: torch.dtype, scale: float
) -> None:
    """A checkpoint may have scales; the kernel divides by them before it rounds."""
    (cache,) = caches(KVCacheLayout.LBHNC, block=32, dtype=torch.uint8)[:1]
    layer = Layer(cache, write, "vec", named, scale)
    parts = token_parts([layer])
    assert parts is not None
    key, value = torch.randint(-8, 9, (2, 1, 2, 32)).float().unbind()
    layer.update(key * scale, value * scale, torch.tensor([3 * 32 + 5]))
    rows = [part[3, :, 5] for part in parts]
    assert torch.equal(
        torch.cat(rows, dim=-1).view(stored).float(), torch.cat([key[0], value[0]], -1)
    )


@pytest.mark.parametrize("layout", [*LAYOUTS, KVCacheLayout.LBNHC], ids=lambda layout: layout.name)
def test_tokens_are_read_where_a_row_has_all_of_one(layout: KVCacheLayout) -> None:
    """The cache itself is the only part."""
    layers = [Layer(cache, plain) for cache in caches(layout)]
    check_rows(layers, 1, 16, 2, 32)
    parts = token_parts(layers)
    assert parts is not None
    assert [part.data_ptr() for part in parts] == [layer.kv_cache.data_ptr() for layer in layers]


@pytest.mark.parametrize("write", [backwards, quantized])
def test_kv_of_an_unknown_form_is_not_read(write: Write) -> None:
    """Nor is anything of a model of which one layer does not fit."""
    made = caches(KVCacheLayout.LBHNC)
    assert token_parts([Layer(cache, write) for cache in made]) is None
    assert (
        token_parts([Layer(made[0], plain), Layer(made[1], plain), Layer(made[2], write)]) is None
    )


def test_layers_that_differ_are_not_read() -> None:
    """All parts have to be of one kind."""
    made = caches(KVCacheLayout.LBHNC)
    assert token_parts([Layer(made[0], plain), Layer(made[1], on_cpu, "vec16")]) is None


def test_a_layer_that_fails_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    """And the log says which, and why."""
    logger = logging.getLogger("vllm.flying_serving")
    logger.addHandler(caplog.handler)
    try:
        assert (
            token_parts([Layer(cache, refusing) for cache in caches(KVCacheLayout.LBHNC)]) is None
        )
    finally:
        logger.removeHandler(caplog.handler)
    record = caplog.records[0]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "KV of Layer cannot be read, so it will not move"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "latent attention has no keys"


def test_layers_that_share_a_cache_count_once() -> None:
    """In the order in which their caches first come."""
    made = caches(KVCacheLayout.LBHNC)
    parts = token_parts([Layer(made[number], plain) for number in (2, 0, 2, 0)])
    assert parts is not None
    assert [part.data_ptr() for part in parts] == [made[2].data_ptr(), made[0].data_ptr()]


def test_looking_changes_no_cache() -> None:
    """What is tried is tried on other memory."""
    made = caches(KVCacheLayout.LBHNC)
    for cache in made:
        cache.normal_()
    before = [cache.clone() for cache in made]
    token_parts([Layer(cache, on_cpu, "vec16") for cache in made])
    assert all(torch.equal(cache, was) for cache, was in zip(made, before, strict=True))


# ---- memory


@pytest.mark.parametrize("kernel_blocks", [None, [16]])
def test_without_a_buffer_vllm_allocates(kernel_blocks: list[int] | None) -> None:
    """With the arguments as they came."""
    seen: list[Any] = []

    def original(*args: Any) -> str:
        seen.append(args)
        return "allocated"

    with shared_kv_buffer(torch.empty(1, dtype=torch.int8)):
        pass
    config = kv_config(LAYOUTS[0], 16, 2, 32, torch.float32)
    assert allocate_or_share(original, config, "device", "layout", kernel_blocks) == "allocated"  # type: ignore[arg-type]
    assert seen == [(config, "device", "layout", kernel_blocks)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_kv_memory_may_be_given_from_outside(layout: KVCacheLayout) -> None:
    """Of just the size that vLLM would allocate, with the same views."""
    config = kv_config(layout, 16, 2, 32, torch.float32)
    own = allocate_kv_cache(config, torch.device("cpu"), layout)
    memory: list[torch.Tensor] = []

    def allocate(size_bytes: int) -> torch.Tensor:
        memory.append(torch.zeros(size_bytes, dtype=torch.int8))
        return memory[0]

    with kv_memory_from(allocate):
        found = allocate_or_share(allocate_kv_cache, config, torch.device("cpu"), layout)
    assert [one.numel() for one in memory] == [own[NAMES[0]].untyped_storage().nbytes()]
    for name, view in own.items():
        assert found[name].shape == view.shape
        assert found[name].stride() == view.stride()
        assert found[name].untyped_storage().data_ptr() == memory[0].data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_lane_has_the_bytes_of_another(layout: KVCacheLayout) -> None:
    """Half the heads and twice the tokens: block by block the same bytes in each layer."""
    first = caches(layout, block=16, heads=4)
    buffer = torch.empty(0, dtype=torch.int8).set_(first[0].untyped_storage())
    with shared_kv_buffer(buffer):
        config = kv_config(layout, 32, 2, 32, torch.float32)
        second = allocate_or_share(allocate_kv_cache, config, torch.device("cpu"), layout)
    assert list(second) == NAMES
    for number, (one, name) in enumerate(zip(first, NAMES, strict=True)):
        assert second[name].shape == (BLOCKS, 2, 32, 64)
        one.copy_(torch.arange(one.numel()).view(one.shape) + number)
        assert torch.equal(second[name].flatten(1), one.flatten(1))


def test_a_lane_sees_blocks_as_its_kernels_do() -> None:
    """A block of 32 tokens is two of 16."""
    layout = KVCacheLayout.LBHNC
    first = caches(layout, block=16, heads=4)
    with shared_kv_buffer(torch.empty(0, dtype=torch.int8).set_(first[0].untyped_storage())):
        config = kv_config(layout, 32, 2, 32, torch.float32)
        second = allocate_or_share(allocate_kv_cache, config, torch.device("cpu"), layout, [16])
    assert second["layer1"].shape == (2 * BLOCKS, 2, 16, 64)
    assert second["layer1"].data_ptr() == first[1].data_ptr()


def test_a_request_may_need_what_a_group_holds() -> None:
    """vLLM's check sees the memory of the widest group, and only while that is said."""
    seen: list[int] = []

    def original(available_memory: int, *others: Any) -> None:
        seen.append(available_memory)
        assert others == (need, 400, estimate)

    def need() -> int:
        return 1000

    def estimate(memory: int) -> int:
        return memory

    check_pooled_memory(original, 300, need, 400, estimate)
    with pooled_capacity(4):
        check_pooled_memory(original, 300, need, 400, estimate)
    check_pooled_memory(original, 300, need, 400, estimate)
    assert seen == [300, 1200, 300]
