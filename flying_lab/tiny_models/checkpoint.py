"""The weights and the configuration of a tiny random model, in Hugging Face format.

Weights are drawn with plain IEEE arithmetic on integers. So the same shape and seed give the same
bytes on every machine, with any vector instructions. Nothing here imports transformers, and torch
is imported for quantized weights alone.
"""

import hashlib
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import deserialize
from safetensors.numpy import save_file

from flying_lab.tiny_models import deepseek, falcon_h1, gemma4, gpt_oss, qwen3_5
from flying_lab.tiny_models.drawn import Sizes
from flying_lab.tiny_models.tokenizer import BOS, EOS, MAX_POSITIONS, write_json, write_tokenizer

Array = npt.NDArray[np.float32]

_NUMPY_NAMES = {
    "F32": "float32",
    "F16": "float16",
    "U8": "uint8",
    "I8": "int8",
    "I32": "int32",
    "I64": "int64",
}
MARKER = "tiny.json"
STD_AT_256 = 0.12
"""Standard deviation of the weights at hidden size 256: that of logits is then about 2."""


@dataclass(frozen=True)
class Shape:
    """The sizes of one model. `experts` is 0 for a dense model. `quantized`: a format of
    `quantized.py`; empty: the weights are float32. `mxfp4`: experts of gpt-oss are in that format.
    """

    family: str = "llama"
    hidden: int = 256
    intermediate: int = 512
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 512
    experts: int = 0
    tied: bool = False
    quantized: str = ""
    mxfp4: bool = False

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden // self.heads

    @property
    def std(self) -> float:
        """Standard deviation of the weights: one spread of logits for every hidden size."""
        return float(STD_AT_256 * (256 / self.hidden) ** 0.5)


SHAPES: dict[str, Shape] = {
    "llama": Shape(),
    "llama-mqa": Shape(kv_heads=1),
    "llama-tied": Shape(tied=True),
    "qwen2": Shape(family="qwen2"),
    "qwen3": Shape(family="qwen3"),
    "mixtral": Shape(family="mixtral", experts=4),
    # experts alone, in blocks of which four ranks have one each
    "mixtral-fp8": Shape(family="mixtral", experts=4, quantized="fp8-block-experts"),
    "gpt-oss": Shape(family="gpt_oss", experts=4),
    # ten blocks of an expert, which four ranks cut into 3, 3, 3 and 1
    "gpt-oss-mxfp4": Shape(family="gpt_oss", intermediate=320, experts=4, mxfp4=True),
    "gemma4": Shape(family="gemma4", tied=True),
    "falcon-h1": Shape(family="falcon_h1"),
    "deepseek-v3": Shape(family="deepseek_v3", experts=8),
    "qwen3.5": Shape(family="qwen3_5"),
    "llama-75m": Shape(hidden=768, intermediate=1536, layers=12, heads=12, vocab=8192),
    "llama-w4a16": Shape(quantized="w4a16"),
    "llama-gptq": Shape(quantized="gptq"),
    "llama-awq": Shape(quantized="awq"),
    "llama-int8": Shape(quantized="int8"),
    "llama-fp8": Shape(quantized="fp8"),
    "llama-fp8-channel": Shape(quantized="fp8-channel"),
    "llama-mixed": Shape(quantized="mixed"),
    # four ranks have one head each, and whole blocks with one scale
    "llama-fp8-mixed": Shape(hidden=512, layers=3, heads=4, quantized="fp8-mixed"),
}

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
}
_OWN_TENSORS = {"gemma4": gemma4.tensors, "qwen3_5": qwen3_5.tensors}
"""Of families whose tensors have little in common with others'."""


def make_model(path: str | Path, shape: str | Shape, *, seed: int = 0) -> Path:
    """Write the model of a `shape`, or of a name in SHAPES, to the directory `path`, unless this
    code has written it there.

    The directory appears complete or not at all. Raises KeyError for an unknown shape and
    FileExistsError if the path holds something that is not a model made here.
    """
    path, sizes = Path(path), SHAPES[shape] if isinstance(shape, str) else shape
    key = _key(shape, seed)
    if _made_by(path) == key:
        return path
    if path.exists() and any(path.iterdir()) and _made_by(path) is None:
        raise FileExistsError(f"{path} holds something that is not a tiny model")
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        save_file(
            dict(_tensors(sizes, seed)),
            str(scratch / "model.safetensors"),
            metadata={"format": "pt"},
        )
        write_json(scratch / "config.json", _config(sizes))
        write_json(scratch / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})
        write_tokenizer(scratch, sizes.vocab)
        if sizes.quantized:
            _quantize(scratch, sizes.quantized)
        write_json(scratch / MARKER, {"key": key, "shape": str(shape), "seed": seed})
        scratch.chmod(0o755)
        if path.exists():
            shutil.rmtree(path)
        try:
            scratch.rename(path)
        except OSError:  # another process was faster
            if _made_by(path) != key:
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def weights_hash(path: str | Path) -> str:
    """Return a hash of every tensor's name, shape and bytes, so that two recordings can tell
    whether models differ.
    """
    digest = hashlib.sha256()
    data = (Path(path) / "model.safetensors").read_bytes()
    tensors = deserialize(data)  # type: ignore[no-untyped-call]
    for name, tensor in sorted(tensors):
        dtype = _NUMPY_NAMES.get(tensor["dtype"], tensor["dtype"])
        digest.update(f"{name}{tuple(tensor['shape'])}{dtype}".encode())
        digest.update(tensor["data"])
    return digest.hexdigest()[:16]


def _quantize(path: Path, name: str) -> None:
    # the other models are written without torch
    from flying_lab.tiny_models.quantized import quantize

    quantize(path, name)


def _key(shape: str | Shape, seed: int) -> str:
    """Return the identity of a model: the text of the modules that write it, the shape and the
    seed.
    """
    folder = Path(__file__).parent
    families = ("deepseek.py", "falcon_h1.py", "gemma4.py", "gpt_oss.py", "qwen3_5.py")
    modules = ("checkpoint.py", "drawn.py", "tokenizer.py", *families, "quantized.py")
    sources = b"".join((folder / module).read_bytes() for module in modules)
    return hashlib.sha256(sources + f"{shape} {seed}".encode()).hexdigest()


def _made_by(path: Path) -> str | None:
    """Return the key of the model that this code wrote to `path`, None if it wrote none."""
    marker = path / MARKER
    return str(json.loads(marker.read_text(encoding="utf-8"))["key"]) if marker.exists() else None


def draw(name: str, shape: tuple[int, ...], std: float, seed: int, mean: float = 0.0) -> Array:
    """Return uniform float32 numbers with this mean and standard deviation; the name and the seed
    fix them.

    `random` gives an integer below 2**24 over 2**24. One subtraction (exact), one product and one
    sum follow, each rounded as IEEE 754 says.
    """
    random = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    numbers = random.random(shape, dtype=np.float32)
    numbers -= np.float32(0.5)
    numbers *= np.float32(std * 12**0.5)
    return numbers if mean == 0.0 else numbers + np.float32(mean)


def _tensors(sizes: Shape, seed: int) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield the checkpoint's (name, tensor). Norms are drawn around 1, so that one bound to the
    wrong place shows. Sinks are about as large as scores.
    """
    if sizes.family in _OWN_TENSORS:
        given = Sizes(
            sizes.hidden,
            sizes.intermediate,
            sizes.layers,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            sizes.vocab,
            sizes.std,
        )
        for name, shape, std, mean in _OWN_TENSORS[sizes.family](given):
            yield name, draw(name, shape, std, seed, mean)
        return
    for name, shape in tensor_shapes(sizes):
        if name.endswith("norm.weight"):
            yield name, draw(name, shape, 0.1, seed, mean=1.0)
            continue
        drawn = draw(name, shape, 1.0 if name.endswith("sinks") else sizes.std, seed)
        if sizes.mxfp4 and gpt_oss.is_mxfp4(name):
            yield from gpt_oss.quantized(name, drawn)
        else:
            yield name, drawn


def tensor_shapes(sizes: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the checkpoint's (name, shape)."""
    yield "model.embed_tokens.weight", (sizes.vocab, sizes.hidden)
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}."
        yield from (
            (f"{prefix}self_attn.{name}", shape) for name, shape in _attention_shapes(sizes)
        )
        yield from ((prefix + name, shape) for name, shape in _other_shapes(sizes, layer))
    last_norm = "final_layernorm" if sizes.family == "falcon_h1" else "norm"
    yield f"model.{last_norm}.weight", (sizes.hidden,)
    if not sizes.tied:
        yield "lm_head.weight", (sizes.vocab, sizes.hidden)


def _attention_shapes(sizes: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of one attention layer: biases in qwen2, norms of queries and keys in
    qwen3.
    """
    if sizes.family == "gpt_oss":
        yield from gpt_oss.attention_shapes(
            sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim
        )
        return
    if sizes.family == "deepseek_v3":
        yield from deepseek.attention_shapes(sizes.hidden, sizes.heads)
        return
    rows = {
        "q": sizes.heads * sizes.head_dim,
        "k": sizes.kv_heads * sizes.head_dim,
        "v": sizes.kv_heads * sizes.head_dim,
    }
    for part, size in rows.items():
        yield f"{part}_proj.weight", (size, sizes.hidden)
        if sizes.family == "qwen2":
            yield f"{part}_proj.bias", (size,)
    yield "o_proj.weight", (sizes.hidden, rows["q"])
    if sizes.family == "qwen3":
        yield "q_norm.weight", (sizes.head_dim,)
        yield "k_norm.weight", (sizes.head_dim,)


def _other_shapes(sizes: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of one layer without its attention."""
    if sizes.family == "falcon_h1":
        yield from falcon_h1.layer_shapes(sizes.hidden, sizes.intermediate)
        return
    yield "input_layernorm.weight", (sizes.hidden,)
    yield "post_attention_layernorm.weight", (sizes.hidden,)
    yield from _mlp_shapes(sizes, layer)


def _mlp_shapes(sizes: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield (name, shape) of one feed-forward layer, dense or of experts."""
    is_dense = not sizes.experts
    if sizes.family == "deepseek_v3":
        is_dense = layer < deepseek.DENSE_LAYERS
        if not is_dense:
            yield from deepseek.mlp_shapes(sizes.hidden, sizes.experts)
            return
    if sizes.family == "gpt_oss":
        yield from gpt_oss.mlp_shapes(sizes.hidden, sizes.intermediate, sizes.experts)
        return
    up, down = (sizes.intermediate, sizes.hidden), (sizes.hidden, sizes.intermediate)
    if is_dense:
        yield from (
            ("mlp.gate_proj.weight", up),
            ("mlp.up_proj.weight", up),
            ("mlp.down_proj.weight", down),
        )
        return
    yield "block_sparse_moe.gate.weight", (sizes.experts, sizes.hidden)
    for expert in range(sizes.experts):
        yield from (
            (f"block_sparse_moe.experts.{expert}.{w}.weight", s)
            for w, s in (("w1", up), ("w2", down), ("w3", up))
        )


def _config(sizes: Shape) -> dict[str, Any]:
    """Return the text of config.json."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[sizes.family]],
        "model_type": sizes.family,
        "dtype": "float32",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "initializer_range": sizes.std,
        "tie_word_embeddings": sizes.tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "use_cache": True,
    }
    if sizes.family == "gpt_oss":
        config |= gpt_oss.configuration(
            sizes.layers, sizes.experts, MAX_POSITIONS, mxfp4=sizes.mxfp4
        )
    elif sizes.family == "gemma4":
        config |= gemma4.configuration(sizes.layers, sizes.vocab)
    elif sizes.family == "qwen3_5":
        return qwen3_5.configuration(config)
    elif sizes.family == "falcon_h1":
        config |= falcon_h1.configuration()
    elif sizes.family == "deepseek_v3":
        config |= deepseek.configuration(sizes.heads, sizes.experts, MAX_POSITIONS)
    elif sizes.experts:
        config |= {
            "num_local_experts": sizes.experts,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        }
    return config
