"""KV of latent attention: one vector of a token, which every rank has."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import Module
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from flying_serving.layout.shards import lane_block_tokens
from flying_serving.vllm_adapter.kv.cache import token_parts
from flying_serving.vllm_adapter.kv.heads import fewest_kv_heads

BLOCKS, TOKENS, LATENT, ROPE = 5, 16, 512, 64
PLACES = torch.tensor([TOKENS, 3 * TOKENS + 1, 5 * TOKENS - 1])


class Writer(CPUMLAImpl):  # type: ignore[misc]
    """vLLM's backend for the CPU, without a model."""

    def __init__(self) -> None:
        pass


class Backwards(Writer):
    """A backend that writes rotated keys first, as no known one does."""

    def do_kv_cache_update(self, latents: Any, keys: Any, cache: Any, places: Any, *_: Any) -> None:
        cache.view(-1, LATENT + ROPE)[places] = torch.cat([keys[:, 0], latents], -1)


class LatentLayer(MLAAttention):  # type: ignore[misc]
    """An attention layer with a cache of zeros."""

    def __init__(self, writer: Writer) -> None:
        Module.__init__(self)
        self.impl = writer
        self.kv_lora_rank, self.kv_cache_dtype = LATENT, "auto"
        self._k_scale = torch.ones(())
        self.kv_cache = torch.zeros(BLOCKS, TOKENS, LATENT + ROPE)


def test_tokens_are_read_as_the_backend_writes_them() -> None:
    layers = [LatentLayer(Writer()) for _ in range(2)]
    parts = token_parts(layers)
    assert parts is not None
    latents, keys = torch.randn(len(PLACES), LATENT), torch.randn(len(PLACES), 1, ROPE)
    cache = layers[1].kv_cache
    layers[1].impl.do_kv_cache_update(latents, keys, cache, PLACES, "auto", torch.ones(()))
    rows = parts[1][PLACES // TOKENS, 0, PLACES % TOKENS]
    assert torch.equal(rows, torch.cat([latents, keys[:, 0]], -1))
    assert not parts[0].any()


def test_vectors_in_another_order_are_not_read() -> None:
    assert token_parts([LatentLayer(Writer()), LatentLayer(Backwards())]) is None


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_block_of_a_group_has_the_tokens_of_an_engine(size: int) -> None:
    """vLLM counts as many KV heads as attention heads; there is one, which replicates."""
    model = SimpleNamespace(use_mla=True, get_total_num_kv_heads=lambda: 8)
    assert lane_block_tokens(TOKENS, size, 1, fewest_kv_heads(model)) == TOKENS
