"""The parts of a tiny DeepSeek V3 that other models lack.

It has latent attention, a dense first layer, and grouped experts. Their router has a correction
bias.
"""

from collections.abc import Iterator
from typing import Any

Q_RANK, KV_RANK = 64, 512
"""Sizes of the latents of queries, and of keys and values."""
NOPE, ROPE, VALUE = 32, 64, 32
"""Sizes of a head: of its keys without and with rotation, and of its values.

vLLM's kernel for the CPU takes latents of 512 and rotated keys of 64.
"""
EXPERT_GROUPS = 2
EXPERT_SIZE = 128
DENSE_LAYERS = 1
_CONTEXT_FACTOR = 8

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def attention_shapes(hidden: int, heads: int) -> Shapes:
    """Yield (name, shape) of one attention layer."""
    yield "q_a_proj.weight", (Q_RANK, hidden)
    yield "q_a_layernorm.weight", (Q_RANK,)
    yield "q_b_proj.weight", (heads * (NOPE + ROPE), Q_RANK)
    yield "kv_a_proj_with_mqa.weight", (KV_RANK + ROPE, hidden)
    yield "kv_a_layernorm.weight", (KV_RANK,)
    yield "kv_b_proj.weight", (heads * (NOPE + VALUE), KV_RANK)
    yield "o_proj.weight", (hidden, heads * VALUE)


def mlp_shapes(hidden: int, experts: int) -> Shapes:
    """Yield (name, shape) of one layer of experts, one of which sees every token."""
    yield "mlp.gate.weight", (experts, hidden)
    yield "mlp.gate.e_score_correction_bias", (experts,)
    for expert in ("shared_experts", *(f"experts.{number}" for number in range(experts))):
        yield f"mlp.{expert}.gate_proj.weight", (EXPERT_SIZE, hidden)
        yield f"mlp.{expert}.up_proj.weight", (EXPERT_SIZE, hidden)
        yield f"mlp.{expert}.down_proj.weight", (hidden, EXPERT_SIZE)


def configuration(heads: int, experts: int, max_positions: int) -> dict[str, Any]:
    """Return the values of config.json that differ from other models'."""
    return {
        "num_key_value_heads": heads,
        "q_lora_rank": Q_RANK,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": EXPERT_GROUPS,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": EXPERT_SIZE,
        "first_k_dense_replace": DENSE_LAYERS,
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": float(_CONTEXT_FACTOR),
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": max_positions // _CONTEXT_FACTOR,
        },
    }
