"""Which models the zoo has: every text-generation architecture of vLLM's registry, in sizes that a
test can run.

Pure data and its rules; neither torch nor vLLM is imported before it is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from zoo.native_models import LLAMA, NATIVE, VISION_BLOCKS
from zoo.rotation import LATENT

VOCAB = 512
MAX_MODEL_LEN = 1024
WINDOW = 64
"""Of the models that slide: shorter than most prompts."""
ALL_OF_IT = 2 * MAX_MODEL_LEN
"""A window that no request leaves."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "n_embd": 256,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "num_attention_heads": 8,
    "n_head": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "max_position_embeddings": ALL_OF_IT,
    "n_positions": ALL_OF_IT,
    "original_max_position_embeddings": ALL_OF_IT,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "attention_dropout": 0.0,
    # latent attention
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    # recurrent state
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "mamba_d_state": 16,
    # logits are scaled down by a width that these models have not; without it they say something
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    # as others scale attention: with the default of these models it would be a choice of one token
    "attention_multiplier": 32**-0.5,
}
"""Values of configuration fields, for the configurations that have them."""

WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size")

_ONE_ATTENTION_LAYER = [
    "linear_attention",
    "full_attention",
    "linear_attention",
    "linear_attention",
]

_DELTA: dict[str, Any] = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""Of gated delta nets: heads of the size that vLLM's kernel for the CPU takes."""
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": ALL_OF_IT // 4,
    },
}
"""Of DeepSeek's models and those like them."""
OVERRIDES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {
        "score_func": "sigmoid",
        "route_norm": True,
        "n_group": 1,
        "topk_group": 1,
    },
    # transformers has a norm that vLLM wants of every layer in layers of experts alone
    "AXK1ForCausalLM": _LATENT | {"n_routed_experts": 8, "n_group": 2, "first_k_dense_replace": 0},
    "DbrxForCausalLM": {
        "d_model": 256,
        "n_heads": 8,
        "n_layers": 4,
        "max_seq_len": ALL_OF_IT,
        "attn_config": {"kv_n_heads": 4, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT
    | {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "Ernie4_5_MoeForCausalLM": {
        "moe_k": 2,
        "moe_num_experts": 4,
        "moe_num_shared_experts": 1,
        "moe_layer_end_index": 3,
    },
    "FalconForCausalLM": {"ffn_hidden_size": 1024, "num_kv_heads": 4},
    "Gemma3nForCausalLM": {
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 16,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    },
    "Gemma4ForCausalLM": {
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ],
        "global_head_dim": 64,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 32,
        "num_experts": None,
        "final_logit_softcapping": 30.0,
    },
    "GPTJForCausalLM": {"rotary_dim": 16},
    "Gemma2ForCausalLM": {"query_pre_attn_scalar": 32},
    "Gemma3ForCausalLM": {
        "query_pre_attn_scalar": 32,
        "layer_types": [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
        ],
    },
    "VaultGemmaForCausalLM": {"query_pre_attn_scalar": 32},
    "InklingForConditionalGeneration": {
        "vision_config": {"text_hidden_size": 256, "hidden_size": 64, "n_layers": 4},
        "audio_config": {"text_hidden_size": 256},
        "text_config": {
            "vocab_size": VOCAB,
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 32,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
        },
    },
    "Glm4MoeForCausalLM": {"head_dim": 32},
    "Glm4MoeLiteForCausalLM": {"num_key_value_heads": 8, "first_k_dense_replace": 1},
    "HrmTextForCausalLM": {"num_layers_per_stack": 2},
    "HYV3ForCausalLM": {
        "first_k_dense_replace": 1,
        "expert_hidden_dim": 128,
        "route_norm": True,
        "qk_norm": True,
    },
    "MiniCPM3ForCausalLM": {"num_key_value_heads": 8},
    "MiniMaxM2ForCausalLM": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "MiMoV2FlashForCausalLM": {
        "layer_types": [
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "hybrid_layer_pattern": [0, 1, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "layernorm_epsilon": 1e-5,
        "sliding_window_size": ALL_OF_IT,
        "swa_head_dim": 32,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4,
    },
    "GPTBigCodeForCausalLM": {"num_key_value_heads": 1},
    "PhiMoEForCausalLM": {"attention_bias": True, "lm_head_bias": True},
    "HunYuanMoEV1ForCausalLM": {"moe_topk": 2},
    "Llama4ForCausalLM": {
        "intermediate_size_mlp": 512,
        "intermediate_size": 256,
        "num_experts_per_tok": 1,
    },
    "LongcatFlashForCausalLM": {
        "num_key_value_heads": 8,
        "num_layers": 2,
        "ffn_hidden_size": 256,
        "expert_ffn_hidden_size": 128,
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "moe_topk": 2,
    },
    "FalconH1ForCausalLM": {
        "mamba_d_ssm": 512,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_rms_norm": True,
    },
    "GraniteMoeHybridForCausalLM": {
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "shared_intermediate_size": 128,
        "layer_types": _ONE_ATTENTION_LAYER,
    },
    "Lfm2ForCausalLM": {
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_dim": 256,
        "conv_dim": 256,
        "block_ff_dim": 512,
        "block_auto_adjust_ff_dim": False,
    },
    # every token has every expert: a rounding error of bfloat16 would choose others
    "Qwen3NextForCausalLM": _DELTA | {"num_experts_per_tok": 4},
    "Qwen3_5ForCausalLM": _DELTA,
    "Qwen3_5MoeForCausalLM": _DELTA | {"num_experts_per_tok": 4},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "NemotronHForCausalLM": {
        "mamba_num_heads": 8,
        "n_groups": 2,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    },
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 64, "n_groups": 1},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 512,
        "split_ngram_parts": 1,
        "output_gate_type": "silu",
    },
    "Zamba2ForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "linear_attention"],
        "attention_hidden_size": 512,
        "attention_head_dim": 64,
        "num_key_value_heads": 8,
        "mamba_headdim": 64,
    },
    "OPTForCausalLM": {"ffn_dim": 512, "word_embed_proj_dim": 256, "dropout": 0.0},
    "OlmoForCausalLM": {"clip_qkv": 8.0},
    "OlmoeForCausalLM": {"clip_qkv": 8.0},
    "StableLmForCausalLM": {"use_qkv_bias": True, "qk_layernorm": False},
    "Qwen2MoeForCausalLM": {"decoder_sparse_step": 1},
}
"""What an architecture needs beside SIZES."""

_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
_THREE_POSITIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [4, 6, 6],
    }
}
_THREE_POSITIONS_OF_FEW: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
"""As of Qwen3.5, which rotates a part of each head."""
MULTIMODAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3ForCausalLM",
        {"vision_config": _VISION, "mm_tokens_per_image": 4},
    ),
    "Idefics3ForConditionalGeneration": (
        "LlamaForCausalLM",
        {"vision_config": _VISION},
    ),
    "LlavaForConditionalGeneration": (
        "LlamaForCausalLM",
        {"vision_config": _VISION | {"projection_dim": 64}},
    ),
    "Llama4ForConditionalGeneration": (
        "Llama4ForCausalLM",
        {
            "vision_config": _VISION
            | {
                "intermediate_size": 256,
                "vision_output_dim": 64,
                "projector_input_dim": 64,
                "projector_output_dim": 64,
            }
        },
    ),
    "Mistral3ForConditionalGeneration": (
        "MistralForCausalLM",
        {"vision_config": _VISION | {"head_dim": 32}},
    ),
    "PaliGemmaForConditionalGeneration": (
        "GemmaForCausalLM",
        {
            "vision_config": _VISION | {"projection_dim": 256, "vision_use_head": False},
            "projection_dim": 256,
        },
    ),
    "Qwen2VLForConditionalGeneration": (
        "Qwen2ForCausalLM",
        {
            "text_config": _THREE_POSITIONS,
            "vision_config": {"depth": 2, "num_heads": 2, "embed_dim": 64, "hidden_size": 256},
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2ForCausalLM",
        {
            "text_config": _THREE_POSITIONS,
            "vision_config": VISION_BLOCKS | {"out_hidden_size": 256, "fullatt_block_indexes": [1]},
        },
    ),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3ForCausalLM",
        {
            "text_config": _THREE_POSITIONS,
            "vision_config": VISION_BLOCKS
            | {
                "out_hidden_size": 256,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        },
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "Qwen3MoeForCausalLM",
        {
            "text_config": _THREE_POSITIONS | {"norm_topk_prob": True},
            "vision_config": VISION_BLOCKS
            | {
                "out_hidden_size": 256,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        },
    ),
    "Qwen3_5ForConditionalGeneration": (
        "Qwen3_5ForCausalLM",
        {
            "text_config": _THREE_POSITIONS_OF_FEW,
            "vision_config": VISION_BLOCKS
            | {"num_heads": 4, "out_hidden_size": 256, "num_position_embeddings": 16},
        },
    ),
    "Qwen3_5MoeForConditionalGeneration": (
        "Qwen3_5MoeForCausalLM",
        {
            "text_config": _THREE_POSITIONS_OF_FEW,
            "vision_config": VISION_BLOCKS
            | {"num_heads": 4, "out_hidden_size": 256, "num_position_embeddings": 16},
        },
    ),
}
"""Models that see or hear as well, served for text alone: the architecture whose OVERRIDES their
text has, and what they need beside.
"""

_SMALL_EMBEDDING = {"model.embed_tokens.weight": (0.125, 0.0), "model.norm.weight": (1.0, 7.0)}
_SMALL_EMBEDDING_OF_TEXT = {
    name.replace("model.", "model.language_model."): change
    for name, change in _SMALL_EMBEDDING.items()
}
ADJUSTED: dict[str, dict[str, tuple[float, float]]] = {
    "Gemma2ForCausalLM": _SMALL_EMBEDDING,
    "Gemma3ForCausalLM": _SMALL_EMBEDDING,
    "Gemma3ForConditionalGeneration": _SMALL_EMBEDDING_OF_TEXT,
    "Gemma4ForCausalLM": _SMALL_EMBEDDING,
    "GemmaForCausalLM": _SMALL_EMBEDDING,
    "PaliGemmaForConditionalGeneration": _SMALL_EMBEDDING_OF_TEXT,
    "VaultGemmaForCausalLM": _SMALL_EMBEDDING,
}
"""Weights by name: a factor, and what is added. Models that multiply embeddings and use them as
their head would repeat the last token for ever; what such embeddings lose the last norm gains.
"""

ALIASES: dict[str, str] = {
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "TeleChat3ForCausalLM": "LlamaForCausalLM",
}
"""Names for which vLLM runs the code of another one, and transformers has a class for that."""


GATED_DELTA = (
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen4ExpForCausalLM",
)
"""Models with gated delta nets: vLLM's kernel for the CPU takes bfloat16 alone."""
RECURRENT = (
    *GATED_DELTA,
    "BailingMoeV2_5ForCausalLM",
    "BailingMoeV3ForCausalLM",
    "FalconH1ForCausalLM",
    "Glm5NextForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "KimiLinearForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "NemotronHForCausalLM",
    "Zamba2ForCausalLM",
)
"""Models with recurrent state and attention."""

SEE_TOO = (*MULTIMODAL, "HCXVisionV2ForCausalLM")
"""Models that are served for text alone. vLLM has the last one among those that generate text."""


@dataclass(frozen=True)
class Model:
    """One model of the zoo.

    Args:
        architecture: its name in vLLM's registry.
        variant: what tells it from others of the architecture, in words; empty for the usual one.
        fields: values of its configuration.
        quantized: a format of `flying_lab.tiny_models.quantized`, which its variant names; empty:
            its weights are float32.
    """

    architecture: str
    variant: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    quantized: str = field(default="", repr=False)

    @property
    def name(self) -> str:
        """What a user calls it, and its folder."""
        return (
            f"{self.architecture}-{self.variant.replace(' ', '-')}"
            if self.variant
            else self.architecture
        )

    @property
    def engine_options(self) -> dict[str, Any]:
        """Arguments of vLLM's engine that this model is served with, beside those of all."""
        options: dict[str, Any] = (
            {"language_model_only": True} if self.architecture in SEE_TOO else {}
        )
        options |= {"attention_backend": "CPU_MLA"} if self.architecture in LATENT else {}
        options |= {"trust_remote_code": True} if self.has_code else {}
        return options | ({"enable_prefix_caching": False} if self.has_state else {})

    @property
    def has_state(self) -> bool:
        """Whether the model has recurrent state. On the CPU stock vLLM caches no prefix of it."""
        return self.architecture in RECURRENT

    @property
    def dtype(self) -> str:
        """The type that the model computes in, without quantization."""
        return "bfloat16" if self.architecture in GATED_DELTA else "float32"

    @property
    def is_rounded(self) -> bool:
        """Whether its products are rounded by more than float32, so that tokens are forced."""
        return bool(self.quantized) or self.dtype != "float32"

    @property
    def has_code(self) -> bool:
        """Whether its checkpoint has code of its own."""
        return self.is_native and bool(NATIVE[self.architecture].module)

    @property
    def is_native(self) -> bool:
        """Whether vLLM alone has a class for it."""
        return self.architecture in NATIVE

    @property
    def flags(self) -> tuple[str, ...]:
        """The same as flags of `serve`."""
        return tuple(_flag(*option) for option in self.engine_options.items())


def _flag(name: str, value: Any) -> str:
    words = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{words}" if value else f"--no-{words}"
    return f"--{words}={value}"


VARIANTS: tuple[Model, ...] = (
    Model("FalconForCausalLM", "biases", {"bias": True, "parallel_attn": False}),
    Model("FalconForCausalLM", "new decoder", {"new_decoder_architecture": True}),
    Model(
        "FalconForCausalLM",
        "ALiBi",
        {
            "alibi": True,
            "bias": True,
            "parallel_attn": False,
            "multi_query": False,
            "num_kv_heads": 8,
        },
    ),
    Model("CohereForCausalLM", "norms of heads", {"use_qk_norm": True}),
    Model("LlamaForCausalLM", "biases", {"attention_bias": True, "mlp_bias": True}),
    Model("LlamaForCausalLM", "tied", {"tie_word_embeddings": True}),
    Model("LlamaForCausalLM", "one KV head", {"num_key_value_heads": 1}),
    Model(
        "GPTBigCodeForCausalLM", "many KV heads", {"multi_query": False, "num_key_value_heads": 8}
    ),
    Model(
        "Gemma4ForCausalLM",
        "fewer KV heads",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
        },
    ),
    Model(
        "Gemma4ForCausalLM",
        "experts",
        {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "sliding_window": WINDOW,
        },
    ),
    Model("GPTNeoXForCausalLM", "sequential", {"use_parallel_residual": False}),
    Model("PhiForCausalLM", "norms of heads", {"qk_layernorm": True}),
    Model("Qwen2MoeForCausalLM", "dense layers too", {"mlp_only_layers": [0, 2]}),
    Model("OPTForCausalLM", "norm after", {"do_layer_norm_before": False}),
    Model("OPTForCausalLM", "narrow embedding", {"word_embed_proj_dim": 128}),
    Model("LagunaForCausalLM", "dense layers", {"mlp_layer_types": ["dense"] * 4}),
    Model("MiniMaxM2ForCausalLM", "softmax routing", {"scoring_func": "softmax"}),
)
"""Ways of binding weights that the usual configuration of an architecture does not show."""


ALL_SLIDE = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Of which vLLM serves no model where some layers have a window and others have none."""

UNREGISTERED = ("SolarOpenForCausalLM",)
"""Not in the registry, so vLLM gives them to its Transformers backend: one with a router's bias
that is a buffer.
"""


@cache
def architectures() -> tuple[str, ...]:
    """The text-generation architectures of vLLM's registry, those of its Transformers backend
    included, and more.
    """
    from vllm.model_executor.models import registry

    own, backend = registry._TEXT_GENERATION_MODELS, registry._TRANSFORMERS_SUPPORTED_MODELS
    return (
        *own,
        *(name for name, (_, target) in backend.items() if "MultiModal" not in target),
        *UNREGISTERED,
    )


@cache
def model_class(architecture: str) -> Any:
    """The class of transformers that makes the checkpoint; None if there is none."""
    import transformers

    return getattr(transformers, ALIASES.get(architecture, architecture), None)


def zoo() -> list[Model]:
    """Every model of the zoo without quantized weights, in the registry's order, those that see or
    hear as well last.
    """
    found = []
    for architecture in architectures():
        found.append(Model(architecture))
        found += [variant for variant in VARIANTS if variant.architecture == architecture]
        if window_field(architecture) is not None:
            found.append(Model(architecture, "sliding window", _sliding(architecture)))
    return found + [Model(architecture, "text only") for architecture in MULTIMODAL]


def window_field(architecture: str) -> str | None:
    """The field of the configuration that holds the attention window's tokens, if it has one."""
    if model_class(architecture) is None or architecture in ALIASES:
        return None
    fields = _default_fields(architecture)
    return next((name for name in WINDOWS if name in fields), None)


def _sliding(architecture: str) -> dict[str, Any]:
    window = window_field(architecture)
    assert window is not None
    fields = {window: WINDOW}
    if "use_sliding_window" in _default_fields(architecture):
        first = 0 if architecture in ALL_SLIDE else 2
        fields |= {"use_sliding_window": True, "max_window_layers": first}
    return fields


@cache
def _default_fields(architecture: str) -> dict[str, Any]:
    return dict(model_class(architecture).config_class().to_dict())


def fields_of(model: Model) -> dict[str, Any]:
    """Every value that the configuration of a model is made with."""
    if model.is_native:
        named = {"architectures": [model.architecture], "dtype": "float32"}
        return LLAMA | NATIVE[model.architecture].fields | named | model.fields
    default = _default_fields(model.architecture)
    fields = _sized(default) | OVERRIDES.get(model.architecture, {}) | model.fields
    if model.architecture in MULTIMODAL:
        text, more = MULTIMODAL[model.architecture]
        of_text = _sized(default["text_config"]) | OVERRIDES.get(text, {})
        fields |= more | {"text_config": of_text | more.get("text_config", {})}
    return fields


def _sized(default: dict[str, Any]) -> dict[str, Any]:
    """The small values of those fields that a configuration has."""
    fields = {name: value for name, value in SIZES.items() if name in default}
    return fields | {name: ALL_OF_IT for name in WINDOWS if default.get(name) is not None}
