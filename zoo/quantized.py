"""Quantized models of the zoo: each format of weights in the shapes that people serve."""

from __future__ import annotations

import shutil
from pathlib import Path

from zoo import rotation, stock
from zoo.architectures import Model
from zoo.checkpoints import write_checkpoint

FORMATS = {
    "w4a16": "bfloat16",
    "w4a16-asymmetric": "bfloat16",
    "gptq": "bfloat16",
    "awq": "bfloat16",
    "int8": "float32",
    "fp8-channel": "float32",
}
"""The type of activations for each format of `flying_lab.tiny_models.quantized`: vLLM's kernels of
int4 take no float32.
"""
SHAPES = ("Llama", "Qwen3", "Qwen3Moe", "Mixtral", "GptOss")


def quantized_models() -> list[Model]:
    """Every format in every shape."""
    return [
        Model(f"{shape}ForCausalLM", name, quantized=name) for name in FORMATS for shape in SHAPES
    ]


def dtype_of(model: Model) -> str:
    """The type in which a model computes."""
    return FORMATS.get(model.quantized, "float32")


def write_model(model: Model, path: Path) -> None:
    """Write the checkpoint of a model to the folder `path`, which must not exist. Raises as
    `write_checkpoint`.
    """
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
    """As `stock.answer_all`, in the type of the model. Body of a forked process, whose setting it
    changes.
    """
    stock.ENGINE["dtype"] = dtype_of(model)
    if model.architecture in rotation.CORRECTED:
        rotation.correct()
    stock.answer_all(path, degree, out, model.engine_options)
