"""The tensors and the configuration of a tiny Gemma 4, with all in which it differs from others.

- Every other layer sees a window. The others have larger and fewer KV heads, and their keys are
  their values.
- The last layer uses the KV of the last one before it that sees everything. Its feed-forward layer
  has twice the width.
- Each layer gets a part of a second embedding.
"""

from collections.abc import Iterator
from typing import Any

from flying_lab.tiny_models.drawn import Drawn, Sizes

WINDOW = 64
KINDS = ("sliding_attention", "full_attention")
FULL_KV_HEADS = 2
FULL_HEAD_DIM = 128
SHARING_LAYERS = 1
LAYER_INPUT = 32
EMBEDDING_PART = 8
"""The embedding is also the head, and is multiplied by 16 as an embedding. It is made smaller by
this factor, and the last norm larger, as the last token would repeat for ever.
"""


def tensors(sizes: Sizes) -> Iterator[Drawn]:
    """Yield the tensors of the checkpoint."""
    layer_inputs = sizes.layers * LAYER_INPUT
    vocabulary = (sizes.vocab, sizes.hidden)
    yield Drawn("model.embed_tokens.weight", vocabulary, sizes.std / EMBEDDING_PART)
    yield Drawn("model.embed_tokens_per_layer.weight", (sizes.vocab, layer_inputs), sizes.std)
    projection = (layer_inputs, sizes.hidden)
    yield Drawn("model.per_layer_model_projection.weight", projection, sizes.std)
    yield _norm("model.per_layer_projection_norm", LAYER_INPUT)
    for layer in range(sizes.layers):
        prefix = f"model.layers.{layer}."
        yield from _attention(sizes, layer, f"{prefix}self_attn.")
        yield from _mlp(sizes, layer, f"{prefix}mlp.")
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield _norm(f"{prefix}{name}_layernorm", sizes.hidden)
        gate, back = (LAYER_INPUT, sizes.hidden), (sizes.hidden, LAYER_INPUT)
        yield Drawn(f"{prefix}per_layer_input_gate.weight", gate, sizes.std)
        yield Drawn(f"{prefix}per_layer_projection.weight", back, sizes.std)
        yield _norm(f"{prefix}post_per_layer_input_norm", sizes.hidden)
        yield Drawn(f"{prefix}layer_scalar", (1,), 0.1, 1.0)
    yield Drawn("model.norm.weight", (sizes.hidden,), 0.1, EMBEDDING_PART)


def _norm(name: str, size: int) -> Drawn:
    return Drawn(f"{name}.weight", (size,), 0.1, 1.0)


def _shares_kv(sizes: Sizes, layer: int) -> bool:
    return layer >= sizes.layers - SHARING_LAYERS


def _attention(sizes: Sizes, layer: int, prefix: str) -> Iterator[Drawn]:
    is_full = layer % 2 == 1
    head_dim = FULL_HEAD_DIM if is_full else sizes.head_dim
    queries = sizes.heads * head_dim
    kv = (FULL_KV_HEADS if is_full else sizes.kv_heads) * head_dim
    yield Drawn(f"{prefix}q_proj.weight", (queries, sizes.hidden), sizes.std)
    yield Drawn(f"{prefix}o_proj.weight", (sizes.hidden, queries), sizes.std)
    yield _norm(f"{prefix}q_norm", head_dim)
    if _shares_kv(sizes, layer):
        return
    yield Drawn(f"{prefix}k_proj.weight", (kv, sizes.hidden), sizes.std)
    yield _norm(f"{prefix}k_norm", head_dim)
    if not is_full:
        yield Drawn(f"{prefix}v_proj.weight", (kv, sizes.hidden), sizes.std)


def _mlp(sizes: Sizes, layer: int, prefix: str) -> Iterator[Drawn]:
    width = sizes.intermediate * (2 if _shares_kv(sizes, layer) else 1)
    for name in ("gate", "up"):
        yield Drawn(f"{prefix}{name}_proj.weight", (width, sizes.hidden), sizes.std)
    yield Drawn(f"{prefix}down_proj.weight", (sizes.hidden, width), sizes.std)


def configuration(layers: int, vocab: int) -> dict[str, Any]:
    """Return the values of config.json that differ from other models'."""
    return {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [KINDS[layer % 2] for layer in range(layers)],
        "sliding_window": WINDOW,
        "global_head_dim": FULL_HEAD_DIM,
        "num_global_key_value_heads": FULL_KV_HEADS,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": SHARING_LAYERS,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": LAYER_INPUT,
        "vocab_size_per_layer_input": vocab,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
        },
    }
