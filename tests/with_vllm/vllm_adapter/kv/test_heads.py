"""How many KV heads layers have, in vLLM's description of a model."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.model_arch import ModelArchitectureConfig

from flying_serving.vllm_adapter.kv.heads import fewest_kv_heads, kv_head_counts, kv_heads_of

LAYER = ModelArchitectureConfig(
    architectures=["X"],
    model_type="x",
    text_model_type=None,
    hidden_size=64,
    total_num_hidden_layers=3,
    total_num_attention_heads=8,
    head_size=32,
    vocab_size=100,
    total_num_kv_heads=8,
    num_experts=0,
    num_experts_per_token=0,
    quantization_config=None,
    is_deepseek_mla=False,
    is_mm_prefix_lm=False,
    rswa_window=None,
    derived_max_model_len_and_key=(512, None),
)


def model(*kv_heads: int) -> Any:
    """A model with a layer for each number of KV heads."""
    layers = [replace(LAYER, total_num_kv_heads=count) for count in kv_heads]
    architecture = ModelArchitectureConfig.from_layers(layers)
    return SimpleNamespace(
        use_mla=False,
        model_arch_config=architecture,
        get_total_num_kv_heads=lambda: architecture.total_num_kv_heads,
    )


def test_layers_with_equal_heads_have_one_number() -> None:
    assert kv_head_counts(model(8, 8, 8)) == [8]


def test_layers_with_different_heads_have_each_number_once() -> None:
    assert kv_head_counts(model(8, 8, 2)) == [2, 8]
    assert fewest_kv_heads(model(8, 2, 8)) == 2


def test_layers_without_kv_heads_do_not_count() -> None:
    assert kv_head_counts(model(0, 4, 8)) == [4, 8]


@pytest.mark.parametrize(
    ("heads_here", "devices", "expected"), [(2, 1, 2), (1, 1, 1), (4, 2, 8), (1, 4, 2)]
)
def test_heads_of_a_layer_count_those_of_all_devices(
    heads_here: int, devices: int, expected: int
) -> None:
    found = kv_heads_of("model.layers.1.self_attn.attn", heads_here, devices, model(8, 2, 8))
    assert found == expected


@pytest.mark.parametrize("devices", [1, 4])
def test_a_layer_with_latent_attention_has_one_head_on_all_devices(devices: int) -> None:
    latent = model(8, 8, 8)
    latent.use_mla = True
    assert kv_head_counts(latent) == [1]
    assert kv_heads_of("model.layers.0.self_attn.attn", 1, devices, latent) == 1
