"""Architectures that vLLM has a class for and transformers has none: the configuration of a tiny
model of each, and the names of its checkpoint where vLLM's differ.

Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_POSITIONS = 2048

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
"""A configuration that transformers knows: other values in the file become its attributes."""
MODULE = "configuration_native.py"
"""The file of a checkpoint's own configuration class."""
_AUTO_MAP = {"AutoConfig": "configuration_native.NativeConfig"}
_BLOCKS = """\
from transformers import LlamaConfig


class Block(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class NativeConfig(LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **kwargs):
        super().__init__(**kwargs)
        self.block_configs = [
            Block({name: Block(part) for name, part in block.items()}) for block in block_configs
        ]
"""
_OWN = """\
from transformers import LlamaConfig


class NativeConfig(LlamaConfig):
    model_type = "{model_type}"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.rope_theta = self.rope_parameters["rope_theta"]
        self.rope_scaling = None
"""
VISION_BLOCKS: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "head_dim": 64,
}
"""Latent attention, of the one width that vLLM's kernel on the CPU has."""
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
_GROUPED: dict[str, Any] = {"n_group": 1, "topk_group": 1}
_BAILING = _EXPERTS | {
    "num_shared_experts": 1,
    "use_bias": False,
    "use_qkv_bias": False,
    "embedding_dropout": 0.0,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


@dataclass(frozen=True)
class Native:
    """What the checkpoint of an architecture needs.

    Args:
        fields: values of its config.json beside LLAMA.
        names: patterns and what replaces them, which make the checkpoint's name of a tensor from
            that of vLLM's parameter, when stacked parameters have been taken apart.
        module: the source of a configuration class, which the checkpoint then has as its own code.
        experts_together: the checkpoint has one tensor for all experts of a layer.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    names: tuple[tuple[str, str], ...] = ()
    module: str = ""
    experts_together: bool = False


def _with_code(model_type: str, fields: dict[str, Any]) -> Native:
    """Return a model whose checkpoint has a configuration class of its own, of this type."""
    own = {"model_type": model_type, "auto_map": _AUTO_MAP}
    return Native(fields | own, module=_OWN.format(model_type=model_type))


_PANGU = ((r"gate\.e_score", "e_score"),)
_CHATGLM = Native(
    {
        "model_type": "chatglm",
        "num_layers": 4,
        "padded_vocab_size": 512,
        "ffn_hidden_size": 512,
        "kv_channels": 32,
        "seq_length": MAX_POSITIONS,
        "multi_query_attention": True,
        "multi_query_group_num": 4,
        "add_qkv_bias": True,
        "original_rope": True,
    }
)

NATIVE: dict[str, Native] = {
    "BailingMoeForCausalLM": Native(
        _BAILING | {"score_function": "softmax", "moe_router_enable_expert_bias": False}
    ),
    "BailingMoeV2ForCausalLM": Native(
        _BAILING | _GROUPED | {"use_qk_norm": True, "use_rmsnorm": True}
    ),
    "BailingMoeV2_5ForCausalLM": _with_code(
        "bailing_hybrid", _BAILING | _GROUPED | _LATENT | {"layer_group_size": 2}
    ),
    "BailingMoeV3ForCausalLM": _with_code(
        "bailing_hybrid",
        _BAILING
        | _GROUPED
        | _LATENT
        | {
            "layer_group_size": 2,
            "no_kda_lora": True,
            "short_conv_kernel_size": 4,
            "moe_shared_expert_intermediate_size": 128,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "ChatGLMModel": _CHATGLM,
    "ChatGLMForConditionalGeneration": _CHATGLM,
    "DeciLMForCausalLM": Native(
        {
            "model_type": "nemotron-nas",
            "auto_map": _AUTO_MAP,
            "block_configs": [
                {
                    "attention": {"no_op": layer == 1, "n_heads_in_group": 2},
                    "ffn": {"no_op": layer == 2, "ffn_mult": 1.5},
                }
                for layer in range(4)
            ],
        },
        module=_BLOCKS,
    ),
    "DeepseekForCausalLM": Native(_EXPERTS | {"n_shared_experts": 1, "moe_layer_freq": 1}),
    "ExaoneForCausalLM": Native(
        {"activation_function": "silu", "layer_norm_epsilon": 1e-5, "num_layers": 4}
    ),
    "Glm5NextForCausalLM": Native(
        _EXPERTS
        | _LATENT
        | {
            "model_type": "glm5_next_text",
            "num_key_value_heads": 8,
            "qk_rope_head_dim": 0,
            "n_shared_experts": 1,
            "index_topk": 64,
            "index_head_dim": 32,
            "index_n_heads": 4,
            "linear_head_dim": 32,
            "linear_num_heads": 8,
        }
    ),
    "HCXVisionV2ForCausalLM": Native(
        {
            "model_type": "hyperclovax_vision_v2",
            "text_config": LLAMA,
            "vision_config": VISION_BLOCKS | {"out_hidden_size": 256, "fullatt_block_indexes": [1]},
        }
    ),
    "InternLM2ForCausalLM": Native(),
    "IQuestLoopCoderForCausalLM": Native(names=((r"(gate_projections\.\d+)\.gate_proj", r"\1"),)),
    # vLLM routes by a sigmoid on the CPU among groups of experts alone
    "K2HorizonForCausalLM": Native(
        _EXPERTS
        | {
            "num_shared_experts": 1,
            "moe_gate_bias": True,
            "router_score_func": "softmax",
            "router_scaling_factor": 1.0,
            "rope_head_dim": 16,
            "query_key_norm": True,
            "attention_bias": False,
            "attention_gate_func": "silu",
            "decoder_sparse_step": 1,
            "mova_num_experts": 0,
            "layernorm_num_groups": 1,
        }
    ),
    "LongcatFlashNgramForCausalLM": Native(
        {
            "model_type": "longcat_flash",
            "num_layers": 2,
            "ffn_hidden_size": 256,
            "expert_ffn_hidden_size": 128,
            "zero_expert_num": 2,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "ngram_vocab_size_ratio": 2,
            "emb_split_num": 2,
            "emb_neighbor_num": 3,
        }
        | _LATENT
    ),
    "MiniCPMForCausalLM": Native({"scale_depth": 1.4, "scale_emb": 12, "dim_model_base": 256}),
    "MiniMaxM3SparseForCausalLM": Native({"model_type": "minimax_m3_vl_text"} | _EXPERTS),
    "MistralLarge3ForCausalLM": Native(
        {"model_type": "deepseek_v3", "n_shared_experts": 1, "topk_method": "noaux_tc"}
        | _EXPERTS
        | _GROUPED
        | _LATENT
    ),
    "MiMoForCausalLM": Native({"model_type": "qwen2"}),
    "MiMoV2ForCausalLM": Native(
        _EXPERTS
        | _GROUPED
        | {
            "hybrid_layer_pattern": [0, 1, 1, 0],
            "moe_layer_freq": [0, 1, 1, 1],
            "layernorm_epsilon": 1e-5,
            "sliding_window_size": MAX_POSITIONS,
            "swa_head_dim": 32,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 4,
            "attention_bias": False,
        }
    ),
    "MuseGlimmerForCausalLM": Native(
        {
            "model_type": "muse_glimmer_text",
            "hidden_activation": "silu",
            "sliding_window": MAX_POSITIONS,
            "qk_scale_factor": 4.0,
            "output_multiplier": 1.0,
        }
    ),
    "NanbeigeForCausalLM": Native(),
    "NemotronHPuzzleForCausalLM": Native({"model_type": "nemotron_h"}),
    "OrionForCausalLM": Native(),
    "PanguEmbeddedForCausalLM": Native({"bias": True}),
    # without sinks, for which vLLM has FlashAttention alone
    "PanguProMoEV2ForCausalLM": Native(
        _EXPERTS
        | {
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "router_enable_expert_bias": True,
            "sandwich_norm": True,
            "qkv_bias": True,
        },
        names=_PANGU,
    ),
    "PanguUltraMoEForCausalLM": Native(
        _EXPERTS
        | _LATENT
        | {
            "model_type": "deepseek_v3",
            "n_shared_experts": 1,
            "routed_scaling_factor": 1.5,
            "router_enable_expert_bias": True,
            "sandwich_norm": True,
        },
        names=_PANGU,
    ),
    "Param2MoEForCausalLM": _with_code("param2moe", _BAILING | _GROUPED | {"use_qk_norm": True}),
    "Plamo3ForCausalLM": Native(
        {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "interleaved_sliding_window": [MAX_POSITIONS, None] * 2,
            "rope_local_theta": 10000,
        }
    ),
    "Rnj1ForCausalLM": Native(
        {
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 32,
            "attention_bias": False,
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": None,
            "layer_types": ["full_attention"] * 4,
        }
    ),
    "SarvamMoEForCausalLM": Native(
        _BAILING | _GROUPED | {"use_qk_norm": True, "use_rmsnorm": True}
    ),
    "SarvamMLAForCausalLM": Native(
        _BAILING | _GROUPED | _LATENT | {"model_type": "deepseek_v3", "q_lora_rank": None}
    ),
    "SolarForCausalLM": Native(
        {"bskcn_1": [1], "bskcn_2": [2], "bskcn_3": [3], "bskcn_4": [3], "bskcn_tv": [0.9, 0.8]}
    ),
    "Step1ForCausalLM": Native({"num_attention_groups": 4}),
    "Step3TextForCausalLM": Native(
        {
            "model_type": "step3_text",
            "num_attention_groups": 1,
            "num_key_value_heads": 1,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": 128,
            "max_position_embedding": MAX_POSITIONS,
            "share_expert_dim": 128,
            "share_q_dim": 64,
            "norm_expert_weight": True,
            "moe_layers_enum": "1,2,3",
        },
        experts_together=True,
    ),
    # routes as K2 Horizon
    "Step3p5ForCausalLM": Native(
        {
            "model_type": "step3p5",
            "num_attention_groups": 4,
            "rope_theta": 10000.0,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": 128,
            "share_expert_dim": 128,
            "moe_router_activation": "softmax",
            "use_head_wise_attn_gate": True,
            "sliding_window": MAX_POSITIONS,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        }
    ),
    "TeleChat2ForCausalLM": Native(
        {
            "n_layer": 4,
            "n_head": 8,
            "num_key_value_heads": 8,
            "ffn_hidden_size": 512,
            "layer_norm_epsilon": 1e-5,
        }
    ),
    "TeleFLMForCausalLM": Native({"use_mup": True, "mup_scale_factor": 2.0, "output_mult": 2.0}),
}
"""By name in vLLM's registry."""
