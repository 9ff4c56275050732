"""Rotary embeddings of queries and keys that have a dimension for heads, on the CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from flying_serving.vllm_adapter.cpu_build.rotary import rotate_heads

SIZE, HEADS, TOKENS = 64, 4, 6
POSITIONS = torch.arange(TOKENS) + 3
Pair = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(params=[True, False], ids=["neox", "interleaved"])
def embedding(request: pytest.FixtureRequest) -> Iterator[Any]:
    with set_current_vllm_config(VllmConfig()):
        yield RotaryEmbedding(SIZE, SIZE, 64, 10000.0, request.param, torch.float32)


@pytest.fixture
def latent() -> Pair:
    """The rotated parts of queries and of keys as latent attention has them: views by head."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(TOKENS, HEADS, 32 + SIZE, generator=generator)
    latents = torch.randn(TOKENS, 512 + SIZE, generator=generator)
    return query[..., 32:], latents[:, 512:].unsqueeze(1)


def by_kernel(embedding: Any, query: torch.Tensor, key: torch.Tensor) -> Pair:
    """What vLLM's kernel makes of copies."""
    query, key = query.clone(), key.clone()
    cache = embedding.cos_sin_cache
    ops.rotary_embedding(POSITIONS, query, key, SIZE, cache, embedding.is_neox_style)
    return query, key


def test_heads_are_rotated_as_the_kernel_rotates_rows_of_heads(
    embedding: Any, latent: Pair
) -> None:
    flat = by_kernel(embedding, *(part.flatten(1) for part in latent))
    rotated = rotate_heads(RotaryEmbedding.forward_cpu, embedding, POSITIONS, *latent)
    for part, expected, before in zip(rotated, flat, latent, strict=True):
        assert part is not None
        assert part.shape == before.shape
        torch.testing.assert_close(part.flatten(1), expected, atol=1e-5, rtol=0)


def test_rows_of_heads_are_left_to_the_kernel(embedding: Any, latent: Pair) -> None:
    def kernel(*given: Any) -> Any:
        return given

    query, key = (part.flatten(1) for part in latent)
    assert rotate_heads(kernel, embedding, POSITIONS, query, key) == (
        embedding,
        POSITIONS,
        query,
        key,
    )


def test_the_kernel_rotates_heads_by_positions_of_other_tokens(
    embedding: Any, latent: Pair
) -> None:
    """The reason for the patch: without it the first rows of heads are taken for tokens."""
    query, key = latent[0].contiguous(), latent[1].contiguous()
    rotated, _ = by_kernel(embedding, query, key)
    rows = query.view(-1, SIZE)
    as_tokens, _ = by_kernel(embedding, rows[:TOKENS].contiguous(), key.flatten(1))
    assert torch.equal(rotated.view(-1, SIZE)[:TOKENS], as_tokens)
    assert torch.equal(rotated.view(-1, SIZE)[TOKENS:], rows[TOKENS:])
