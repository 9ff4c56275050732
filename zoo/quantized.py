"""Quantized models of the zoo: each format of weights in the shapes that people serve."""

from __future__ import annotations

import shutil
from pathlib import Path

from zoo import rotation, stock
from zoo.architectures import Model
from zoo.checkpoints import write_checkpoint
from zoo.forced import FORCED_AFTER, FORCED_BATCH, PROCESSOR
from zoo.native import write_native

FORMATS = {
    "w4a16": "bfloat16",
    "w4a16-asymmetric": "bfloat16",
    "gptq": "bfloat16",
    "awq": "bfloat16",
    "int8": "float32",
    "fp8-channel": "float32",
    "fp8": "bfloat16",
    "fp8-block": "bfloat16",
}
"""The type of activations for each format of `flying_lab.tiny_models.quantized`: vLLM's kernels of
int4 take no float32.
"""
FP8_KV = "with KV in FP8"
SHAPES = ("Llama", "Qwen3", "Qwen3Moe", "Mixtral", "GptOss")


def quantized_models() -> list[Model]:
    """Every format in every shape, and some with KV in FP8."""
    models = [
        Model(f"{shape}ForCausalLM", name, quantized=name) for name in FORMATS for shape in SHAPES
    ]
    models += [
        Model("LlamaForCausalLM", f"{name} {FP8_KV}", quantized=name)
        for name in ("w4a16", "int8", "fp8-channel")
    ]
    return models


def dtype_of(model: Model) -> str:
    """The type in which a model computes."""
    return FORMATS.get(model.quantized, model.dtype)


def kv_dtype_of(model: Model) -> str:
    """The type in which a model keeps its KV, by its name in vLLM's flags."""
    return "fp8" if model.variant.endswith(FP8_KV) else "auto"


def write_model(model: Model, path: Path) -> None:
    """Write the checkpoint of a model to the folder `path`, which must not exist. Raises as
    `write_checkpoint` or `write_native`.
    """
    if model.is_native:
        write_native(model, path)
        return
    if not model.quantized:
        write_checkpoint(model, path)
        return
    from flying_lab.tiny_models.quantized import quantize

    plain = path.with_name(f".{path.name}-plain")
    shutil.rmtree(plain, ignore_errors=True)
    write_checkpoint(model, plain)
    quantize(plain, model.quantized)
    plain.rename(path)


def answer_all(model: Model, path: Path, degree: int, out: Path) -> None:
    """As `stock.answer_all`, for a model that rounds in its type and with forced tokens. Body of a
    forked process, whose settings it changes.
    """
    if model.is_rounded:
        stock.ENGINE |= {"dtype": dtype_of(model), "logits_processors": [PROCESSOR]}
        stock.ENGINE |= {"kv_cache_dtype": kv_dtype_of(model)}
        stock.BATCH, stock.AFTER = FORCED_BATCH, FORCED_AFTER
    if model.architecture in rotation.CORRECTED:
        rotation.correct()
    stock.answer_all(path, degree, out, model.engine_options)
