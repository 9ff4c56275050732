"""The parts of a decoder model, from its Hugging Face configuration: parameters, bytes and KV
cache.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from flying_serving.errors import ConfigError

ACTIVATION_BYTES = 2
"""Bytes of one activation or KV value: bfloat16."""


class Piece(NamedTuple):
    """Weights that are lent at once: their bytes on a device, and how many tensors they are."""

    size_bytes: float
    tensors: int


class AttentionKind(NamedTuple):
    """Layers whose attention has the same heads."""

    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer with gated feed-forward layers, dense or with routed experts.

    `degree` below is the number of devices that share the model by tensor parallelism. Norms,
    routers and, beyond the number of KV heads, KV projections are whole on every device. All other
    weights are divided.
    """

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the feed-forward layer, of one expert if there are experts."""
    vocab: int
    tied_embeddings: bool = False
    experts: int = 0
    """Routed experts per layer; 0 for a dense model."""
    experts_per_token: int = 0
    sliding_window: int = 0
    """Tokens that a sliding layer looks back; 0 without a window."""
    sliding_layers: int = 0
    linear_bytes: float = 2.0
    """Bytes per parameter of attention and dense feed-forward weights."""
    expert_bytes: float = 2.0
    """Bytes per parameter of the experts' weights, scales included."""
    embedding_bytes: float = 2.0
    kinds: tuple[AttentionKind, ...] = ()
    """Kinds of layers by their attention; empty: all have `kv_heads` of `head_dim`."""

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """Return the kinds of layers by their attention, at least one."""
        return self.kinds or (AttentionKind(self.layers, self.kv_heads, self.head_dim),)

    @property
    def kv_head_counts(self) -> set[int]:
        """Return the numbers of KV heads that layers have."""
        return {kind.kv_heads for kind in self.attention_kinds}

    @property
    def query_width(self) -> float:
        """Return the width of all queries of a token, the mean of all layers."""
        sizes = (kind.layers * kind.head_dim for kind in self.attention_kinds)
        return self.heads * sum(sizes) / self.layers

    def kv_width(self, degree: int) -> float:
        """Return the width of a token's keys on each device, the mean of all layers. At least one
        head is on each, so heads replicate beyond their number.
        """
        return self._kv_numbers(degree) / self.layers

    def _kv_numbers(self, degree: int) -> int:
        return sum(
            kind.layers * max(1, kind.kv_heads // degree) * kind.head_dim
            for kind in self.attention_kinds
        )

    @property
    def feed_forward_params(self) -> int:
        """Return the parameters of gate, up and down of one dense layer or of one expert."""
        return 3 * self.hidden * self.intermediate

    @property
    def embedding_params(self) -> int:
        """Return the parameters of input embedding and output head."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    def kv_bytes_per_token(self, degree: int) -> int:
        """Return the bytes of KV cache per token on each device. All layers keep all KV (one KV
        cache group).
        """
        return 2 * self._kv_numbers(degree) * ACTIVATION_BYTES

    def weight_bytes(self, degree: int) -> float:
        """Return the bytes of weights on each device."""
        attention = 2 * self.hidden * (self.query_width / degree + self.kv_width(degree))
        whole = ACTIVATION_BYTES * (2 * self.hidden + self.hidden * self.experts)
        layers = self.layers * (self.linear_bytes * attention + whole) + self.mlp_bytes(degree)
        return layers + self.embedding_bytes * self.embedding_params / degree

    def pieces(self, degree: int) -> list[Piece]:
        """Return the divided weights on each device, in the order in which they are lent: MLPs
        first.
        """
        mlp = Piece(self.mlp_bytes(degree) / self.layers, 3 * max(1, self.experts))
        width = self.query_width / degree + self.kv_width(degree)
        attention = Piece(self.linear_bytes * 2 * self.hidden * width, 4)
        vocabulary = Piece(
            self.embedding_bytes * self.embedding_params / degree, 1 if self.tied_embeddings else 2
        )
        return [mlp] * self.layers + [attention] * self.layers + [vocabulary]

    def mlp_bytes(self, degree: int) -> float:
        """Return the bytes of feed-forward weights on each device, of the experts if there are
        any.
        """
        of_each = self.expert_bytes * self.experts if self.experts else self.linear_bytes
        return self.layers * of_each * self.feed_forward_params / degree


def names() -> list[str]:
    """Return the names of the models whose configurations are packaged."""
    return sorted(_library())


def load(name_or_path: str) -> Model:
    """Load a packaged model by its name, or any model by the path of its `config.json` or of the
    folder that has one.

    Raises:
        ConfigError: no such model, or a configuration that this cost model does not cover; names
            field and file.
    """
    library = _library()
    if name_or_path.lower() in library:
        return from_config(
            name_or_path.lower(), library[name_or_path.lower()]["config"], "packaged models.json"
        )
    path = Path(name_or_path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = ", ".join(sorted(library))
        raise ConfigError(f"model={name_or_path!r}: neither a file nor one of {known}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"model={name_or_path!r}: {path} is no JSON file: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"model={name_or_path!r}: {path} must hold one JSON object")
    return from_config(path.resolve().parent.name, config, str(path))


def from_config(name: str, config: Mapping[str, Any], where: str) -> Model:
    """Read a Hugging Face configuration, of a multimodal model its `text_config`; `where` is the
    file, for messages.

    Raises:
        ConfigError: a field is missing, out of range, or of an architecture that is not covered.
    """
    config = config.get("text_config", config)
    _refuse_uncovered(config, where)
    count = partial(_count, config, where)
    heads = count("num_attention_heads")
    hidden = count("hidden_size")
    layers = count("num_hidden_layers")
    experts = count("num_local_experts", "num_experts", "n_routed_experts", default=0)
    intermediate = count("intermediate_size")
    if experts:
        intermediate = count("moe_intermediate_size", default=intermediate)
    linear_bytes, expert_bytes = _weight_bytes(config, where)
    window, sliding_layers = _sliding(config, where, layers)
    kv_heads = count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{where}: num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}"
        )
    return Model(
        name=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=count("head_dim", default=hidden // heads),
        intermediate=intermediate,
        vocab=count("vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        experts=experts,
        experts_per_token=count("num_experts_per_tok", "experts_per_token") if experts else 0,
        sliding_window=window,
        sliding_layers=sliding_layers,
        linear_bytes=linear_bytes,
        expert_bytes=expert_bytes,
        kinds=_kinds(config, where, kv_heads),
    )


def _count(config: Mapping[str, Any], where: str, *fields: str, default: int | None = None) -> int:
    """Return the first field that is there, a positive integer; null counts as absent."""
    for field in fields:
        value = config.get(field)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{where}: {field}={value!r}: must be an integer of at least 1")
        return value
    if default is None:
        raise ConfigError(f"{where}: {fields[0]} is missing; must be an integer of at least 1")
    return default


def _refuse_uncovered(config: Mapping[str, Any], where: str) -> None:
    for field, what in (
        ("kv_lora_rank", "multi-head latent attention"),
        ("ssm_cfg", "state space layers"),
        ("mamba_d_state", "state space layers"),
        ("is_encoder_decoder", "an encoder"),
        ("first_k_dense_replace", "a mix of dense and expert layers"),
        ("enable_moe_block", "experts beside a dense layer"),
        ("hidden_size_per_layer_input", "embeddings of layers"),
        ("num_kv_shared_layers", "layers that use the KV of others"),
    ):
        if config.get(field):
            raise ConfigError(
                f"{where}: {field}={config[field]!r}: {what} is not covered by the cost model"
            )


def _weight_bytes(config: Mapping[str, Any], where: str) -> tuple[float, float]:
    """Return the bytes per parameter of linear and of expert weights, scales included."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return 2.0, 2.0
    method = quantization.get("quant_method")
    if method == "mxfp4":
        # Four bits and one 8-bit scale per 32 values, experts only: OCP Microscaling Formats (MX)
        # 1.0, section 5.2.
        return 2.0, (32 * 4 + 8) / 32 / 8
    if method in ("fp8", "fbgemm_fp8"):
        return 1.0, 1.0
    if method in ("awq", "gptq") and quantization.get("bits") in (4, 8):
        return quantization["bits"] / 8, quantization["bits"] / 8
    raise ConfigError(
        f"{where}: quantization_config.quant_method={method!r}: must be mxfp4, fp8, awq or gptq"
    )


def _sliding(config: Mapping[str, Any], where: str, layers: int) -> tuple[int, int]:
    """Return the window in tokens and how many layers have it."""
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return 0, 0
    kinds = config.get("layer_types")
    return _count(config, where, "sliding_window"), kinds.count(
        "sliding_attention"
    ) if kinds else layers


def _kinds(config: Mapping[str, Any], where: str, kv_heads: int) -> tuple[AttentionKind, ...]:
    """Return the kinds of layers where those without a window have other heads (Gemma 4)."""
    if config.get("global_head_dim") is None:
        return ()
    full_heads = kv_heads
    if config.get("attention_k_eq_v"):
        full_heads = _count(config, where, "num_global_key_value_heads", default=kv_heads)
    local, full = (
        config["layer_types"].count(kind) for kind in ("sliding_attention", "full_attention")
    )
    return (
        AttentionKind(local, kv_heads, _count(config, where, "head_dim")),
        AttentionKind(full, full_heads, _count(config, where, "global_head_dim")),
    )


def _library() -> dict[str, Any]:
    text = files("flying_lab.sim").joinpath("data", "models.json").read_text(encoding="utf-8")
    library: dict[str, Any] = json.loads(text)
    return library
