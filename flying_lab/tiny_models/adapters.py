"""A random adapter (LoRA) of a tiny model, on disk, in PEFT's format."""

from collections.abc import Iterator
from pathlib import Path

from safetensors.numpy import save_file

from flying_lab.tiny_models.checkpoint import SHAPES, Array, Shape, draw, tensor_shapes
from flying_lab.tiny_models.tokenizer import write_json

RANK = 8
ALPHA = 16
_B_STD = 0.1
_EMBEDDING_STD = 0.1
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
VOCABULARY = ("embed_tokens", "lm_head")
"""The matrices of a vocabulary, which an adapter may change too."""


def make_adapter(
    path: Path,
    shape: str,
    *,
    seed: int,
    rank: int = RANK,
    targets: tuple[str, ...] = PROJECTIONS,
) -> Path:
    """Write an adapter of a model's `shape` to the directory `path`, if there is none yet. Returns
    the path.

    A is drawn such that it keeps the size of its inputs. B is such that the adapter adds about a
    third of a layer's own output. `targets`: the last parts of the names of layers.
    """
    if (path / "adapter_config.json").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        dict(_tensors(SHAPES[shape], seed, rank, targets)), path / "adapter_model.safetensors"
    )
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": ALPHA,
        "bias": "none",
        "target_modules": list(targets),
    }
    write_json(path / "adapter_config.json", settings)
    return path


def _tensors(
    sizes: Shape, seed: int, rank: int, targets: tuple[str, ...]
) -> Iterator[tuple[str, Array]]:
    """Yield A (rank, inputs) and B (outputs, rank) of each layer, with the names of PEFT."""
    for weight, (outputs, inputs) in _layers(sizes, targets):
        name = f"base_model.model.{weight}"
        if weight.endswith("embed_tokens"):
            a, b = f"{name}.lora_embedding_A", f"{name}.lora_embedding_B"
            yield a, draw(a, (rank, outputs), _EMBEDDING_STD, seed)
            yield b, draw(b, (inputs, rank), _B_STD, seed)
        else:
            a, b = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
            yield a, draw(a, (rank, inputs), float(inputs**-0.5), seed)
            yield b, draw(b, (outputs, rank), _B_STD, seed)


def _layers(sizes: Shape, targets: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name and the shape (outputs, inputs) of each layer that the adapter changes."""
    for name, shape in tensor_shapes(sizes):
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in targets and len(shape) == 2:
            yield layer, (shape[0], shape[1])
