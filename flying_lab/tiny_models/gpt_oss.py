"""The tensors and the configuration that gpt-oss has beside other models, with experts in float32
or in MXFP4.

MXFP4 has blocks of 32 numbers of four bits, with a power of two for each block. Numbers are rounded
with plain IEEE arithmetic, so the same shape and seed give the same bytes.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 32
WINDOW = 64
"""Tokens that every other layer sees, from the first one on: shorter than most prompts."""
_MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_BORDERS = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
_LARGEST_EXPONENT = 2
"""Of the largest magnitude, as a power of two."""
_SCALE_BIAS = 127

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def attention_shapes(hidden: int, heads: int, kv_heads: int, head_dim: int) -> Shapes:
    """Yield (name, shape) of one attention layer."""
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    for part, size in rows.items():
        yield f"{part}_proj.weight", (size, hidden)
        yield f"{part}_proj.bias", (size,)
    yield "o_proj.weight", (hidden, rows["q"])
    yield "o_proj.bias", (hidden,)
    yield "sinks", (heads,)


def mlp_shapes(hidden: int, intermediate: int, experts: int) -> Shapes:
    """Yield (name, shape) of one layer of experts. Rows of gate and up alternate."""
    yield "mlp.router.weight", (experts, hidden)
    yield "mlp.router.bias", (experts,)
    yield "mlp.experts.gate_up_proj", (experts, hidden, 2 * intermediate)
    yield "mlp.experts.gate_up_proj_bias", (experts, 2 * intermediate)
    yield "mlp.experts.down_proj", (experts, intermediate, hidden)
    yield "mlp.experts.down_proj_bias", (experts, hidden)


def is_mxfp4(name: str) -> bool:
    """Return whether a tensor is in MXFP4 in a checkpoint of that kind."""
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def quantized(
    name: str, weight: npt.NDArray[np.float32]
) -> Iterator[tuple[str, npt.NDArray[np.uint8]]]:
    """Yield the (name, tensor) of a weight (experts, in, out) in MXFP4: blocks of inputs, and their
    scales. Neighbouring blocks have other scales, so that one in the wrong place shows.
    """
    experts, _, rows = weight.shape
    blocks = weight.swapaxes(1, 2).reshape(experts, rows, -1, BLOCK)
    exponents = np.frexp(np.abs(blocks).max(-1))[1] - 1 - _LARGEST_EXPONENT
    scaled = np.ldexp(blocks, -exponents[..., None])
    codes = np.searchsorted(_BORDERS, np.abs(scaled)).astype(np.uint8)
    codes |= np.where(np.signbit(scaled), np.uint8(8), np.uint8(0))
    yield f"{name}_blocks", codes[..., 0::2] | (codes[..., 1::2] << 4)
    others = np.indices(exponents.shape).sum(0) % 3 - 1
    yield f"{name}_scales", (exponents + others + _SCALE_BIAS).astype(np.uint8)


def configuration(layers: int, experts: int, max_positions: int, *, mxfp4: bool) -> dict[str, Any]:
    """Return the values of config.json that differ from other models'."""
    kinds = ("sliding_attention", "full_attention")
    config: dict[str, Any] = {
        "layer_types": [kinds[layer % 2] for layer in range(layers)],
        "sliding_window": WINDOW,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": max_positions // 8,
        },
    }
    if mxfp4:
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        }
    return config
