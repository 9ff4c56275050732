"""Tiny random checkpoints, made with transformers, in which every number matters."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

from flying_lab.tiny_models.checkpoint import STD_AT_256
from flying_lab.tiny_models.tokenizer import write_tokenizer
from zoo.architectures import ADJUSTED, VOCAB, Model, fields_of, model_class

NOISE = 0.1
"""Standard deviation of what is added to constants: to norms, which are 1 or 0 at first, and to
biases.
"""


def write_checkpoint(model: Model, path: Path) -> None:
    """Write a checkpoint of this model to the folder `path`, which must not exist. Takes this
    process's memory.

    Raises what transformers raises for a configuration that it cannot build.
    """
    import torch

    cls = model_class(model.architecture)
    config = cls.config_class(**fields_of(model))
    torch.manual_seed(0)
    built = cls(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, tensor in built.state_dict().items():
            if tensor.is_floating_point():
                _randomise(name, tensor, torch)
        for name, (factor, added) in ADJUSTED.get(model.architecture, {}).items():
            built.get_parameter(name).mul_(factor).add_(added)
    scratch = path.with_name(f".{path.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    built.save_pretrained(scratch)
    _name_architecture(scratch / "config.json", model.architecture)
    write_tokenizer(scratch, VOCAB)
    scratch.rename(path)


def _randomise(name: str, tensor: Any, torch: Any) -> None:
    """Draw a matrix anew; add noise to what was a constant or has a meaning of its own, such as a
    decay.
    """
    noise = torch.randn(
        tensor.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))
    )
    constant = tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all())
    if tensor.dim() < 2 or constant:
        tensor.add_(noise * NOISE)
    else:
        tensor.copy_(noise * STD_AT_256)


def _name_architecture(path: Path, architecture: str) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"architectures": [architecture], "dtype": "float32"}
    path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
