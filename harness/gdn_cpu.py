"""Gated delta nets in plain torch, token by token, for float32 too, so that lanes with them are
tested exactly.

vLLM's kernel for the CPU takes bfloat16 alone. There degrees differ by rounding, and a stream may
part from its reference at a near-tie. With this one degrees differ by rounding errors of float32.
The rule is transformers' own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import silu, softplus
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

PREAMBLE = "from harness.gdn_cpu import register; register()"
"""Code for a forked server."""


def convolve(channels: torch.Tensor, weight: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return the causal convolution of (tokens, channels), and write what it needs of them later.

    `weight`: (channels, width). `state`: (width - 1, channels), the tokens before.
    """
    width, count = weight.shape[1], len(channels)
    seen = torch.cat([state.to(channels), channels])
    state.copy_(seen[count:])
    terms = (seen[place : place + count] * weight[:, place] for place in range(width))
    return silu(sum(terms, torch.zeros_like(channels)))


def step(layer: Any, mixed: torch.Tensor, gates: torch.Tensor, block: int) -> torch.Tensor:
    """Return what a layer makes of the next tokens of one request, and bring its state in `block`
    up to date.

    Args:
        layer: vLLM's.
        mixed: queries, keys and values before the convolution, (tokens, channels).
        gates: (2, tokens, heads), b and a.
        block: the number of a block.
    """
    before, states = layer.kv_cache[0][block], layer.kv_cache[1][block]
    before = before.t() if is_conv_state_dim_first() else before
    weight = gdn_attention._unpacked_conv_weight(layer)
    query, key, value = layer.rearrange_mixed_qkv(convolve(mixed, weight, before))
    heads = value.shape[2] // key.shape[2]
    decay = -layer.A_log.exp() * softplus(gates[1].float() + layer.dt_bias.float())
    state = states.view(states.shape[0], states.shape[2], states.shape[1])
    out, last = torch_recurrent_gated_delta_rule(
        query.repeat_interleave(heads, 2),
        key.repeat_interleave(heads, 2),
        value,
        g=decay.unsqueeze(0),
        beta=gates[0].float().sigmoid().unsqueeze(0),
        initial_state=state.unsqueeze(0),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    state.copy_(last[0])
    return out[0]


def attend(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """As vLLM's `cpu_gdn_attention_core`, without speculation: write into (tokens, heads, size)."""
    context = get_forward_context()
    layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    found = context.attn_metadata[layer.prefix]
    starts = found.non_spec_query_start_loc.tolist()
    blocks = found.non_spec_state_indices_tensor.tolist()
    gates = torch.stack([b, a])
    for number in range(found.num_decodes + found.num_prefills):
        tokens, block = slice(*starts[number : number + 2]), blocks[number]
        if number >= found.num_decodes and not found.has_initial_state[number]:
            for state in layer.kv_cache[:2]:
                state[block] = 0
        core_attn_out[tokens] = step(layer, mixed_qkv[tokens], gates[:, tokens], block)


def register(replace: Callable[[object, str, object], None] = setattr) -> None:
    """Let vLLM take this in place of its kernel, if it has not registered that one."""
    replace(gdn_attention, "cpu_gdn_attention_core", attend)
