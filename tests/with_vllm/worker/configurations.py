"""Configurations of small models, as vLLM reads them."""

import json
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 515,
    "max_position_embeddings": 512,
}


def small(architecture: str, model_type: str, **others: Any) -> dict[str, Any]:
    return (
        COMMON
        | {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type}
        | others
    )


LLAMA = small("Llama", "llama", intermediate_size=128)
OPT = small("OPT", "opt", ffn_dim=128, word_embed_proj_dim=64)
QWEN2_MOE = small("Qwen2Moe", "qwen2_moe") | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "intermediate_size": 6,  # of layers that are not of experts: there are none
}
GPT_OSS = small(
    "GptOss",
    "gpt_oss",
    head_dim=64,
    intermediate_size=128,
    num_local_experts=8,
    num_experts_per_tok=2,
)
GPT_OSS_MXFP4 = GPT_OSS | {
    "intermediate_size": 320,
    "quantization_config": {"quant_method": "mxfp4"},
}
"""Ten blocks of an expert: four ranks have 3, 3, 3 and 1 of them."""


GEMMA3 = small("Gemma3", "gemma3_text", intermediate_size=128) | {
    "num_hidden_layers": 12,
    "head_dim": 32,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "sliding_window": 64,
}
GEMMA4 = small("Gemma4", "gemma4_text", intermediate_size=128) | {
    "num_hidden_layers": 12,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
    "sliding_window": 64,
    "head_dim": 32,
    "global_head_dim": 64,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_experts": None,
}


def published_gemma4() -> dict[str, Any]:
    """The attention and feed-forward layers of Gemma 4 31B as they were published, without what it
    sees with.
    """
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 10
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "sliding_window": 1024,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "num_experts": None,
        "final_logit_softcapping": 30.0,
        "vocab_size": 262144,
        "max_position_embeddings": 262144,
    }


def published_gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """The configuration of gpt-oss as it was published: 20b has 24 layers and 32 experts, 120b has
    36 and 128.
    """
    kinds = ("sliding_attention", "full_attention")
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": layers,
        "layer_types": [kinds[layer % 2] for layer in range(layers)],
        "sliding_window": 128,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
        "max_position_embeddings": 131072,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
        "rms_norm_eps": 1e-05,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    }


DEEPSEEK_V3 = small(
    "DeepseekV3",
    "deepseek_v3",
    intermediate_size=128,
    moe_intermediate_size=64,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    q_lora_rank=32,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
)
BLOOM = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "hidden_size": 96,
    "n_layer": 2,
    "n_head": 8,
    "vocab_size": 512,
    "seq_length": 512,
}
FALCON = small(
    "Falcon",
    "falcon",
    alibi=True,
    bias=True,
    multi_query=False,
    parallel_attn=False,
    new_decoder_architecture=False,
)


def configuration(path: Path, model: dict[str, Any], dtype: str = "float32") -> VllmConfig:
    """vLLM's, of a model of which there is nothing but its configuration."""
    (path / "config.json").write_text(json.dumps(model))
    args = EngineArgs(
        model=str(path),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=256,
        skip_tokenizer_init=True,
    )
    return args.create_engine_config()


MIXTRAL = small(
    "Mixtral", "mixtral", intermediate_size=256, num_local_experts=4, num_experts_per_tok=2
)
IDEFICS3 = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "model_type": "idefics3",
    "text_config": small("Llama", "llama", num_hidden_layers=6),
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 56,
        "patch_size": 14,
    },
}
