"""Tiny models whose experts run in vLLM's Triton kernel: none quantized, and FP8 of each kind."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig

from tests.with_vllm.worker.configurations import GPT_OSS, MIXTRAL, QWEN2_MOE, configuration
from tests.with_vllm.worker.loaded import alone

_LAYERS = range(MIXTRAL["num_hidden_layers"])
_ATTENTION = [f"model.layers.{n}.self_attn.{part}_proj" for n in _LAYERS for part in "qkvo"]
_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "modules_to_not_convert": _ATTENTION,
}
_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
_OF_EACH_OUTPUT = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_NUMBERS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_NUMBERS, "strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
    "ignore": ["lm_head", "re:.*gate$", "re:.*self_attn.*"],
}


def mixtral(quantization: dict[str, Any], **others: Any) -> dict[str, Any]:
    return MIXTRAL | others | {"quantization_config": quantization}


WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Two blocks of 128 inputs, and four of columns."""
CASES: dict[str, dict[str, Any]] = {
    "floats": QWEN2_MOE | {"moe_intermediate_size": 128},
    "floats-alternating-with-biases": GPT_OSS | {"num_local_experts": 4},
    "fp8-tensor": mixtral(_FP8),
    "fp8-tensor-static": mixtral(_FP8 | {"activation_scheme": "static"}),
    "fp8-channel": mixtral(_OF_EACH_OUTPUT),
    "fp8-block-of-32": mixtral(_FP8 | {"weight_block_size": [32, 32]}),
    "fp8-block-of-128": mixtral(_FP8 | {"weight_block_size": [128, 128]}, **WIDE),
}


def configured(path: Path, model: dict[str, Any]) -> VllmConfig:
    """With `--moe-backend triton`."""
    config = configuration(path, model)
    config.kernel_config.moe_backend = "triton"
    return config


def with_kernel(path: Path, model: dict[str, Any]) -> AbstractContextManager[VllmConfig]:
    """An engine by itself that is configured so."""
    return alone(configured(path, model))
