"""Tiny random checkpoints of models that transformers has no class for, from vLLM's own class.

vLLM builds the model, and its parameters say which tensors a checkpoint has: stacked ones are taken
apart, and names are those before vLLM's own maps of names. Then the model loads the file, and no
number may remain that the file does not give.
"""

from __future__ import annotations

import re
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flying_lab.tiny_models.checkpoint import STD_AT_256
from flying_lab.tiny_models.tokenizer import write_json, write_tokenizer
from zoo.architectures import MAX_MODEL_LEN, VOCAB, Model, fields_of
from zoo.native_models import MODULE, NATIVE, Native

NOISE = 0.1
"""Standard deviation of norms and biases."""
_STACKED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}
"""Parts of stacked parameters, for a model that does not say."""


class Unloaded(Exception):
    """Parameters of a model for which its checkpoint has no number."""


def write_native(model: Model, path: Path) -> None:
    """Write a checkpoint of this model to the folder `path`, which must not exist. Takes this
    process's memory, and its torch world.

    Raises what vLLM raises for a configuration that it cannot build or a name that it does not
    know, and Unloaded.
    """
    from safetensors.torch import save_file

    from flying_serving.vllm_adapter.weights.trees import world_of_one

    scratch = path.with_name(f".{path.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    write_json(scratch / "config.json", fields_of(model))
    if module := NATIVE[model.architecture].module:
        (scratch / MODULE).write_text(module, encoding="utf-8")
    write_tokenizer(scratch, VOCAB)
    config = _engine_config(scratch, model)
    with world_of_one(config):
        built = _build(config)
        tensors = dict(checkpoint_of(built, NATIVE[model.architecture]))
        save_file(tensors, str(scratch / "model.safetensors"), metadata={"format": "pt"})
        _load(built, config)
    scratch.rename(path)


def _engine_config(path: Path, model: Model) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(path),
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        **model.engine_options,
    )
    return arguments.create_engine_config()


def _build(config: Any) -> Any:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        return initialize_model(config, model_config=config.model_config).eval()


def _load(built: Any, config: Any) -> None:
    """Have the model load its file over numbers that are none. Raises Unloaded if one is left."""
    import torch
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    floats = {
        name: parameter
        for name, parameter in built.named_parameters()
        if parameter.is_floating_point()
    }
    with torch.no_grad():
        for parameter in floats.values():
            parameter.fill_(torch.nan)
        DefaultModelLoader(config.load_config).load_weights(built, config.model_config)
    left = [name for name, parameter in floats.items() if bool(parameter.isnan().any())]
    if left:
        raise Unloaded(f"no tensor of the checkpoint is loaded into {', '.join(left)}")


def checkpoint_of(built: Any, native: Native) -> Iterator[tuple[str, Any]]:
    """Yield the name and the random values of each tensor that a checkpoint of vLLM's model has."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    packed = getattr(built, "packed_modules_mapping", {})
    stacked = _STACKED | packed | _stacked_by_mappers(built)
    modules = dict(built.named_modules())
    for name, parameter in built.named_parameters():
        owner, _, key = name.rpartition(".")
        parts = parts_of(owner, key, modules[owner], parameter, stacked)
        if native.experts_together and isinstance(modules[owner], RoutedExperts):
            parts = _together(parts)
        for part, shape in parts:
            saved = before_maps(part, modules)
            for pattern, replacement in native.names:
                saved = re.sub(pattern, replacement, saved)
            yield saved, _draw(saved, shape, _mean(modules[owner], key, parameter))


def before_maps(name: str, modules: Mapping[str, Any]) -> str:
    """Return a name that the model's own maps of names (`hf_to_vllm_mapper`) turn into this one.

    `modules`: those of vLLM's model by name, outer ones before inner ones.
    """
    for owner, module in reversed(modules.items()):
        mapper = getattr(type(module), "hf_to_vllm_mapper", None)
        start = f"{owner}." if owner else ""
        if mapper is None or not name.startswith(start):
            continue
        inner = name.removeprefix(start)
        aims = inner, mapper.map_name(inner)
        pairs = [
            pair
            for table in ("substr", "prefix", "suffix")
            for pair in getattr(mapper, f"orig_to_new_{table}").items()
        ]
        for old, new in pairs:
            candidate = inner.replace(new, old, 1) if new else inner
            if candidate != inner and mapper.map_name(candidate) in aims:
                inner = candidate
        name = start + inner
    return name


def parts_of(
    owner: str, key: str, module: Any, parameter: Any, stacked: Mapping[str, Any]
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of the tensors that vLLM loads into one parameter.

    Args:
        owner: the name of its module.
        key: its name in the module.
        module: that module.
        parameter: the parameter.
        stacked: the parts of a stacked parameter, by the last word of its module's name.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear

    shape = tuple(parameter.shape)
    before, _, last = owner.rpartition(".")
    if isinstance(module, RoutedExperts) and key.startswith(("w13_", "w2_")):
        return _expert_parts(before, key, module, shape)
    words = stacked.get(last, [])
    if isinstance(module, QKVParallelLinear | MergedColumnParallelLinear) and len(words) > 1:
        sizes = list(module.output_sizes)
        assert len(sizes) == len(words), f"{owner}: {words} of {sizes} rows"
        return [
            (f"{before}.{word}.{key}", (size, *shape[1:]))
            for word, size in zip(words, sizes, strict=True)
        ]
    return [(f"{owner}.{key}", shape)]


def _expert_parts(
    before: str, key: str, module: Any, shape: tuple[int, ...]
) -> list[tuple[str, tuple[int, ...]]]:
    kind, _, what = key.partition("_")
    count, rows, *rest = shape
    if kind == "w13" and module.ckpt_up_proj_name is not None:
        words, rows = [module.ckpt_gate_proj_name, module.ckpt_up_proj_name], rows // 2
    else:
        words = [module.ckpt_gate_proj_name if kind == "w13" else module.ckpt_down_proj_name]
    return [
        (f"{before}.{expert}.{word}.{what}", (rows, *rest))
        for expert in range(count)
        for word in words
    ]


def _together(parts: list[tuple[str, tuple[int, ...]]]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the parts of all experts as one tensor for each of an expert's."""
    count: Counter[tuple[str, tuple[int, ...]]] = Counter(
        (re.sub(r"\.experts\.\d+\.", ".", name), shape) for name, shape in parts
    )
    return [(name, (experts, *shape)) for (name, shape), experts in count.items()]


def _stacked_by_mappers(built: Any) -> dict[str, list[str]]:
    """Return the parts of stacked parameters, as the maps of names of a model's modules say."""
    found: dict[str, list[str]] = {}
    for module in built.modules():
        mapper = getattr(type(module), "hf_to_vllm_mapper", None)
        pairs = getattr(mapper, "orig_to_new_stacked", {}).items()
        for word, (stacked, _) in pairs:
            parts = found.setdefault(stacked.split(".")[-1], [])
            if (part := word.split(".")[-1]) not in parts:
                parts.append(part)
    return found


def _mean(module: Any, key: str, parameter: Any) -> float:
    """What is drawn around: what the constructor of a norm has written, and else 0."""
    is_norm = key == "weight" and parameter.dim() == 1 and "Norm" in type(module).__name__
    return float(parameter.detach().flatten()[0]) if is_norm else 0.0


def _draw(name: str, shape: tuple[int, ...], mean: float) -> Any:
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator)
    return noise * (STD_AT_256 if len(shape) > 1 else NOISE) + mean
