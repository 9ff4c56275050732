"""Gated delta nets in plain torch compute what vLLM's kernels for the CPU do, but for rounding."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from harness.gdn_cpu import convolve, step

KEY_HEADS, VALUE_HEADS, SIZE, WIDTH, TOKENS = 2, 4, 128, 4, 70
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * SIZE
SLOT = 1


class Layer(SimpleNamespace):
    """What `step` reads of vLLM's layer."""

    rearrange_mixed_qkv = QwenGatedDeltaNetAttention.rearrange_mixed_qkv


def layer_of(draw: torch.Generator) -> Any:
    """A layer with empty states in two slots."""
    return Layer(
        key_dim=KEY_HEADS * SIZE,
        value_dim=VALUE_HEADS * SIZE,
        head_k_dim=SIZE,
        head_v_dim=SIZE,
        tp_size=1,
        A_log=torch.randn(VALUE_HEADS, generator=draw) - 3,
        dt_bias=torch.randn(VALUE_HEADS, generator=draw),
        conv1d=SimpleNamespace(weight=torch.randn(CHANNELS, 1, WIDTH, generator=draw) / 2),
        kv_cache=[
            torch.zeros(2, WIDTH - 1, CHANNELS),
            torch.zeros(2, VALUE_HEADS, SIZE, SIZE),
        ],
    )


@pytest.fixture
def draw() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_a_prompt_in_parts_leaves_the_state_of_the_whole(draw: torch.Generator) -> None:
    layer = layer_of(draw)
    mixed = torch.randn(TOKENS, CHANNELS, generator=draw)
    gates = torch.randn(2, TOKENS, VALUE_HEADS, generator=draw)
    whole = step(layer, mixed, gates, SLOT)
    states = [state.clone() for state in layer.kv_cache]
    for state in layer.kv_cache:
        state.zero_()
    cuts = (slice(0, 2), slice(2, 60), *(slice(at, at + 1) for at in range(60, TOKENS)))
    parts = [step(layer, mixed[cut], gates[:, cut], SLOT) for cut in cuts]
    torch.testing.assert_close(torch.cat(parts), whole)
    torch.testing.assert_close(layer.kv_cache, states)
    assert not layer.kv_cache[1][0].any()


def test_rule_is_that_of_the_kernel_of_vllm(draw: torch.Generator) -> None:
    """Which takes bfloat16, here of a convolved prompt."""
    layer = layer_of(draw)
    mixed = torch.randn(TOKENS, CHANNELS, generator=draw)
    gates = torch.randn(2, TOKENS, VALUE_HEADS, generator=draw).bfloat16()
    ours = step(layer, mixed, gates.float(), SLOT)
    weight = layer.conv1d.weight[:, 0]
    convolved = convolve(mixed, weight, torch.zeros(WIDTH - 1, CHANNELS)).bfloat16()
    query, key, value = layer.rearrange_mixed_qkv(convolved)
    decay, beta = ops.fused_gdn_gating_cpu(
        A_log=layer.A_log,
        a=gates[1].contiguous(),
        b=gates[0].contiguous(),
        dt_bias=layer.dt_bias.bfloat16(),
    )
    states = torch.zeros(2, VALUE_HEADS, SIZE, SIZE)
    theirs, _ = ops.chunk_gated_delta_rule_cpu(
        query=query,
        key=key,
        value=value,
        g=decay,
        beta=beta,
        initial_state=states,
        output_final_state=True,
        cu_seqlens=torch.tensor([0, TOKENS], dtype=torch.int32),
        head_first=False,
        use_qk_l2norm_in_kernel=True,
        initial_state_indices=torch.tensor([SLOT], dtype=torch.int32),
    )
    assert (ours - theirs[0].float()).norm() < 0.02 * ours.norm()
    state = layer.kv_cache[1][SLOT].view(VALUE_HEADS, SIZE, SIZE)
    assert (states[SLOT] - state).norm() < 0.02 * state.norm()
