"""Configurations of models whose layers are of several kinds, and what doctor makes of them."""

import json
from pathlib import Path
from typing import Any

from flying_serving.cli import model_check, serve

SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


def small(architecture: str, model_type: str) -> dict[str, Any]:
    return {**SMALL, "architectures": [f"{architecture}ForCausalLM"], "model_type": model_type}


LAST_EXPERTS = small("Qwen3Moe", "qwen3_moe") | {
    "num_key_value_heads": 8,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 132,
    "mlp_only_layers": [0, 1, 2],
}


def written(path: Path, config: dict[str, Any]) -> Path:
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return path


def configured(path: Path, config: dict[str, Any], *flags: str) -> tuple[Any, Any]:
    """The flags, and vLLM's configuration of the whole model."""
    model = written(path, config)
    args = serve.parse(
        [str(model), "--load-format=dummy", "--skip-tokenizer-init", *flags], "doctor"
    )
    return args, model_check._configuration(args)
