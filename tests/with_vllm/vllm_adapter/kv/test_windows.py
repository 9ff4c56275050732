"""KV of layers with a window: which of it lanes keep."""

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from flying_serving.vllm_adapter.kv.windows import all_are_local, with_all_kv

SHAPE = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=64, extra_retained_tokens=2, **SHAPE)
CHUNK = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **SHAPE)
FULL = FullAttentionSpec(block_size=32, **SHAPE)


def test_windows_on_every_layer_become_full_attention_of_the_lanes_blocks() -> None:
    """What vLLM makes of a window where another layer sees everything, without the warning."""
    assert with_all_kv({"a": WINDOW, "b": WINDOW}, 32) == dict.fromkeys(
        "ab", FullAttentionSpec(block_size=32, sliding_window=64, **SHAPE)
    )


def test_chunks_on_every_layer_become_full_attention() -> None:
    expected = FullAttentionSpec(block_size=32, attention_chunk_size=64, **SHAPE)
    assert with_all_kv({"a": CHUNK}, 32) == {"a": expected}


def test_blocks_of_the_result_have_the_bytes_of_a_block_of_full_attention() -> None:
    kept = with_all_kv({"a": WINDOW}, 32)["a"]
    assert kept.page_size_bytes == FULL.page_size_bytes


def test_windows_beside_full_attention_are_left_to_vllm() -> None:
    specs: dict[str, KVCacheSpec] = {"a": WINDOW, "b": FULL}
    assert not all_are_local(specs)
    assert with_all_kv(specs, 32) == specs


def test_models_without_kv_have_no_window() -> None:
    assert not all_are_local({})


def test_windows_beside_recurrent_state_become_full_attention() -> None:
    state = MambaSpec(block_size=512, shapes=((4, 8),), dtypes=(torch.float32,))
    specs: dict[str, KVCacheSpec] = {"a": WINDOW, "b": FULL, "c": state}
    kept = with_all_kv(specs, 32)
    assert kept == specs | {"a": FullAttentionSpec(block_size=32, sliding_window=64, **SHAPE)}
