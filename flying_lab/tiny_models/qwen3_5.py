"""The tensors and the configuration of a tiny Qwen3.5, as it is served for text alone: its encoder
of images has no tensors.

The last of four layers has attention, with a gate for each number of its output. The others are
gated delta nets.
"""

from collections.abc import Iterator
from typing import Any

from flying_lab.tiny_models.drawn import Drawn, Sizes

KEY_HEADS, VALUE_HEADS = 4, 8
"""Of gated delta nets."""
HEAD = 128
"""Size of such a head: the one that vLLM's kernel for the CPU takes."""
WIDTH = 4
"""Of the convolution, in tokens."""
LOG_DECAY = -3.0
"""Mean of `A_log`: a state then loses some three percent with a token."""
KINDS = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
ROTATED_PART = 0.25
"""Of each head."""
VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "num_position_embeddings": 16,
}


def _kind(layer: int) -> str:
    return KINDS[layer % len(KINDS)]


def tensors(sizes: Sizes) -> Iterator[Drawn]:
    """Yield the tensors of the checkpoint."""
    text = "model.language_model."
    vocabulary = (sizes.vocab, sizes.hidden)
    yield Drawn(f"{text}embed_tokens.weight", vocabulary, sizes.std)
    for layer in range(sizes.layers):
        prefix = f"{text}layers.{layer}."
        if _kind(layer) == "full_attention":
            yield from _attention(sizes, f"{prefix}self_attn.")
        else:
            yield from _delta_net(sizes, f"{prefix}linear_attn.")
        up, down = (sizes.intermediate, sizes.hidden), (sizes.hidden, sizes.intermediate)
        for name, shape in (("gate", up), ("up", up), ("down", down)):
            yield Drawn(f"{prefix}mlp.{name}_proj.weight", shape, sizes.std)
        for name in ("input", "post_attention"):
            yield _norm(f"{prefix}{name}_layernorm", sizes.hidden)
    yield _norm(f"{text}norm", sizes.hidden)
    yield Drawn("lm_head.weight", vocabulary, sizes.std)


def _norm(name: str, size: int) -> Drawn:
    """Of which a layer adds 1 to the weights."""
    return Drawn(f"{name}.weight", (size,), 0.1)


def _attention(sizes: Sizes, prefix: str) -> Iterator[Drawn]:
    queries, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    for name, rows in (("q", 2 * queries), ("k", kv), ("v", kv)):
        yield Drawn(f"{prefix}{name}_proj.weight", (rows, sizes.hidden), sizes.std)
    yield Drawn(f"{prefix}o_proj.weight", (sizes.hidden, queries), sizes.std)
    yield _norm(f"{prefix}q_norm", sizes.head_dim)
    yield _norm(f"{prefix}k_norm", sizes.head_dim)


def _delta_net(sizes: Sizes, prefix: str) -> Iterator[Drawn]:
    values = VALUE_HEADS * HEAD
    mixed = 2 * KEY_HEADS * HEAD + values
    rows = {"qkv": mixed, "z": values, "b": VALUE_HEADS, "a": VALUE_HEADS}
    for name, count in rows.items():
        yield Drawn(f"{prefix}in_proj_{name}.weight", (count, sizes.hidden), sizes.std)
    yield Drawn(f"{prefix}conv1d.weight", (mixed, 1, WIDTH), sizes.std)
    yield Drawn(f"{prefix}A_log", (VALUE_HEADS,), 0.5, LOG_DECAY)
    yield Drawn(f"{prefix}dt_bias", (VALUE_HEADS,), 0.1)
    yield Drawn(f"{prefix}norm.weight", (HEAD,), 0.1, 1.0)
    yield Drawn(f"{prefix}out_proj.weight", (sizes.hidden, values), sizes.std)


def configuration(text: dict[str, Any]) -> dict[str, Any]:
    """Return config.json, given the values that text models have."""
    top = {"architectures", "dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings"}
    own = {
        "model_type": "qwen3_5_text",
        "layer_types": [_kind(layer) for layer in range(text["num_hidden_layers"])],
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": HEAD,
        "linear_value_head_dim": HEAD,
        "linear_conv_kernel_dim": WIDTH,
        "mamba_ssm_dtype": "float32",
        "attn_output_gate": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": ROTATED_PART,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    given = {name: value for name, value in text.items() if name != "architectures"}
    return {name: value for name, value in text.items() if name in top} | {
        "model_type": "qwen3_5",
        "text_config": given | own,
        "vision_config": VISION | {"out_hidden_size": text["hidden_size"]},
    }
