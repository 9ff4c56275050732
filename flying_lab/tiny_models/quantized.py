"""Quantize the linear layers of a checkpoint: the tensors and the configuration of each format, by
plain torch.

Weights are rounded to the nearest number of the format. So the same checkpoint and format give the
same bytes. Embeddings, LM heads, norms and routers stay as they are.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from flying_lab.tiny_models.tokenizer import write_json

Tensors = dict[str, torch.Tensor]
GROUP = 32
"""Inputs that have a scale in common, where a format has groups."""
WIDE_GROUP = 128
FP8_BLOCK = 128
"""Outputs and inputs of a block with one scale."""
_BITS = 4
_PER_INT32 = 32 // _BITS
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's kernels read eight outputs in this order from one int32."""
_FP8_MAX = 448.0
_LARGEST_INPUT = 8.0
"""Where inputs have a scale of the checkpoint's: larger ones are cut off."""
_EXPERTS = (".w1.weight", ".w2.weight", ".w3.weight")
_LINEAR = ("_proj.weight", *_EXPERTS)
"""Endings of the names of weights that are quantized."""


def pack_int4(numbers: torch.Tensor, dim: int) -> torch.Tensor:
    """Pack eight neighbours of 0 to 15 along a dimension into one int32, the first one lowest."""
    last = numbers.movedim(dim, -1).to(torch.int64)
    nibbles = last.reshape(*last.shape[:-1], -1, _PER_INT32)
    packed = (nibbles << torch.arange(0, 32, _BITS)).sum(-1)
    signed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
    return signed.to(torch.int32).movedim(-1, dim).contiguous()


def int4_groups(weight: torch.Tensor, group: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight (out, in) to 0 to 15, where 8 is zero; return it with a scale for each output
    and group of inputs.
    """
    groups = weight.unflatten(1, (-1, group))
    scales = groups.abs().amax(-1) / 7
    numbers = (groups / scales.unsqueeze(-1)).round().clamp(-8, 7) + 8
    return numbers.flatten(1), scales


def int4_zero_points(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight (out, in) to 0 to 15; return it with scales and zeros of each output and
    group.
    """
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = (high - low) / 15
    zeros = (-low / scales).round().clamp(0, 15)
    numbers = (groups / scales.unsqueeze(-1)).round() + zeros.unsqueeze(-1)
    return numbers.clamp(0, 15).flatten(1), scales, zeros


def _w4a16(weight: torch.Tensor, group: int = GROUP) -> Tensors:
    numbers, scales = int4_groups(weight, group)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {"weight_packed": pack_int4(numbers, 1), "weight_scale": scales, "weight_shape": shape}


def _w4a16_asymmetric(weight: torch.Tensor) -> Tensors:
    numbers, scales, zeros = int4_zero_points(weight)
    return {
        "weight_packed": pack_int4(numbers, 1),
        "weight_scale": scales,
        "weight_zero_point": pack_int4(zeros, 0),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def _w4a16_channel(weight: torch.Tensor) -> Tensors:
    return _w4a16(weight, weight.shape[1])


def _w4a16_wide(weight: torch.Tensor) -> Tensors:
    return _w4a16(weight, WIDE_GROUP)


def _gptq(weight: torch.Tensor) -> Tensors:
    numbers, scales = int4_groups(weight)
    groups = scales.shape[1]
    return {
        "qweight": pack_int4(numbers.t(), 0),
        "scales": scales.t().contiguous().to(torch.float16),
        # the format has a zero less one, for each output and group
        "qzeros": pack_int4(torch.full((groups, weight.shape[0]), 7), 1),
    }


def _awq(weight: torch.Tensor) -> Tensors:
    numbers, scales, zeros = int4_zero_points(weight)
    return {
        "qweight": pack_int4(_awq_order(numbers.t()), 1),
        "scales": scales.t().contiguous().to(torch.float16),
        "qzeros": pack_int4(_awq_order(zeros.t()), 1),
    }


def _awq_order(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.unflatten(1, (-1, _PER_INT32))[..., list(_AWQ_ORDER)].flatten(1)


def _int8(weight: torch.Tensor) -> Tensors:
    scales = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scales).round().to(torch.int8), "weight_scale": scales}


def _fp8(weight: torch.Tensor, scales: torch.Tensor) -> Tensors:
    return {"weight": (weight / scales).to(torch.float8_e4m3fn), "weight_scale": scales}


def _fp8_channel(weight: torch.Tensor) -> Tensors:
    return _fp8(weight, weight.abs().amax(1, keepdim=True) / _FP8_MAX)


def _fp8_tensor(weight: torch.Tensor) -> Tensors:
    return _fp8(weight, weight.abs().amax() / _FP8_MAX)


def _fp8_block(weight: torch.Tensor) -> Tensors:
    blocks = weight.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))
    scales = blocks.abs().amax((1, 3)) / _FP8_MAX
    numbers = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
    return {"weight": numbers.to(torch.float8_e4m3fn), "weight_scale_inv": scales}


def _fp8_static(weight: torch.Tensor) -> Tensors:
    return {**_fp8_tensor(weight), "input_scale": torch.tensor(_LARGEST_INPUT / _FP8_MAX)}


def _fp8_compressed_block(weight: torch.Tensor) -> Tensors:
    tensors = _fp8_block(weight)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Any:
    """Return the `quantization_config` of a checkpoint of compressed-tensors."""
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*gate$"],
    }


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
_TOKENS = {"strategy": "token", "symmetric": True, "dynamic": True, "num_bits": 8}
_NO_HEAD = {"modules_to_not_convert": ["lm_head"]}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", **_NO_HEAD}
_FP8_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
FORMATS: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any]]] = {
    "w4a16": (_w4a16, _compressed("pack-quantized", _INT4, None)),
    "w4a16-asymmetric": (
        _w4a16_asymmetric,
        _compressed("pack-quantized", {**_INT4, "symmetric": False}, None),
    ),
    "w4a16-channel": (
        _w4a16_channel,
        _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}, None),
    ),
    "w4a16-wide": (
        _w4a16_wide,
        _compressed("pack-quantized", {**_INT4, "group_size": WIDE_GROUP}, None),
    ),
    "gptq": (
        _gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    ),
    "awq": (
        _awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, **_NO_HEAD},
    ),
    "int8": (
        _int8,
        _compressed(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            {**_TOKENS, "type": "int"},
        ),
    ),
    "fp8-channel": (
        _fp8_channel,
        _compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            {**_TOKENS, "type": "float"},
        ),
    ),
    "fp8": (_fp8_tensor, _FP8),
    "fp8-block": (_fp8_block, {**_FP8, "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}),
    "fp8-static": (
        _fp8_static,
        _compressed(
            "float-quantized",
            {**_FP8_NUMBERS, "strategy": "tensor"},
            {**_FP8_NUMBERS, "strategy": "tensor", "dynamic": False},
        ),
    ),
    "fp8-compressed-block": (
        _fp8_compressed_block,
        _compressed(
            "float-quantized",
            {**_FP8_NUMBERS, "strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK]},
            {**_FP8_NUMBERS, "strategy": "group", "group_size": FP8_BLOCK, "dynamic": True},
        ),
    ),
}
"""By name: how a weight (out, in) is quantized, and the `quantization_config`."""
MIXED = {
    "mixed": ("w4a16", "int8", "fp8-channel"),
    "fp8-mixed": ("fp8-static", "fp8-channel", "fp8-compressed-block"),
}
"""By name: a format of compressed-tensors for each layer, over and over."""
EXPERTS_ALONE = "fp8-block-experts"
"""`fp8-block`, of experts alone."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def quantize(path: Path, name: str) -> None:
    """Quantize the checkpoint in a folder in place. `name`: of FORMATS, MIXED or EXPERTS_ALONE;
    KeyError otherwise.
    """
    weights = path / "model.safetensors"
    tensors = load_file(weights)
    config = _config(tensors, name)
    save_file(dict(_quantized(tensors, name)), weights, metadata={"format": "pt"})
    text = json.loads((path / "config.json").read_text(encoding="utf-8"))
    write_json(path / "config.json", text | {"quantization_config": config})


def _config(tensors: Tensors, name: str) -> dict[str, Any]:
    """Return the `quantization_config` of a format."""
    if name in MIXED:
        return _mixed_config(tensors, MIXED[name])
    if name == EXPERTS_ALONE:
        kept = [key.removesuffix(".weight") for key in tensors if key.endswith("_proj.weight")]
        return FORMATS["fp8-block"][1] | {"modules_to_not_convert": ["lm_head", *kept]}
    return FORMATS[name][1]


def _mixed_config(tensors: Tensors, formats: Sequence[str]) -> dict[str, Any]:
    """Return the `quantization_config` with a group of layers for each format."""
    layers: dict[str, set[str]] = {name: set() for name in formats}
    for tensor_name in tensors:
        if found := _LAYER.search(tensor_name):
            layers[_of_layer(int(found[1]), formats)].add(found[1])
    groups = {}
    for name, numbers in layers.items():
        config = FORMATS[name][1]
        targets = [f"re:.*layers[.]({'|'.join(sorted(numbers))})[.].*_proj$"]
        group = config["config_groups"]["group_0"]
        groups[name] = {**group, "targets": targets, "format": config["format"]}
    return FORMATS["int8"][1] | {"format": "mixed-precision", "config_groups": groups}


def _of_layer(layer: int, formats: Sequence[str]) -> str:
    return formats[layer % len(formats)]


def _quantized(tensors: Tensors, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    endings = _EXPERTS if name == EXPERTS_ALONE else _LINEAR
    formats = MIXED.get(name, (name.removesuffix("-experts"),))
    for tensor_name, tensor in tensors.items():
        if not tensor_name.endswith(endings) or tensor.dim() != 2:
            yield tensor_name, tensor
            continue
        layer = _LAYER.search(tensor_name)
        rounded, _ = FORMATS[_of_layer(int(layer[1]) if layer else 0, formats)]
        for part, values in rounded(tensor).items():
            yield f"{tensor_name.removesuffix('weight')}{part}", values
