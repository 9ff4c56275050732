"""Models from their configurations."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_lab.sim import hardware, models
from flying_lab.sim.machine import Modelled
from flying_lab.sim.models import Model
from flying_serving.errors import ConfigError
from tests.unit.lab.sim.parameters import active_params, attention_params

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
}
DEGREES = st.sampled_from([1, 2, 4, 8])
NAMES = st.sampled_from(models.names())


def params(model: Model) -> int:
    """All weights but biases."""
    per_layer = attention_params(model) + 2 * model.hidden + model.hidden * model.experts
    per_layer += model.feed_forward_params * max(1, model.experts)
    return model.layers * per_layer + model.hidden + model.embedding_params


@pytest.mark.parametrize(
    ("name", "billions", "gigabytes"),
    [
        ("llama-3-8b", 8.03, 16.1),
        ("nemotron-8b", 8.03, 16.1),
        ("llama-3-70b", 70.6, 141.1),
        ("llama-2-7b", 6.74, 13.5),
        ("llama-2-70b", 69.0, 138.0),
        ("qwen-72b", 72.3, 144.6),
        ("qwen2.5-14b", 14.77, 29.5),
        ("qwen2.5-32b", 32.8, 65.5),
        ("qwen2.5-72b", 72.7, 145.4),
        (
            "gpt-oss-120b",
            116.8,
            65.2,
        ),  # the model card: 116.8 B parameters, a checkpoint of 60.8 GiB
    ],
)
def test_packaged_models_have_the_size_of_their_model_cards(
    name: str, billions: float, gigabytes: float
) -> None:
    model = models.load(name)
    assert params(model) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert model.weight_bytes(1) / 1e9 == pytest.approx(gigabytes, rel=5e-3)


def test_every_packaged_model_is_listed_above() -> None:
    """So that a new one is checked too; it also says where its configuration is from."""
    assert len(models.names()) == 10
    assert all(entry["source"] for entry in models._library().values())


def test_mixture_of_experts() -> None:
    """5.1 B active parameters with embeddings, as GPT-OSS's model card counts; half of its layers
    slide.
    """
    model = models.load("gpt-oss-120b")
    assert (active_params(model) + model.embedding_params / 2) / 1e9 == pytest.approx(
        5.13, rel=1e-2
    )
    assert model.sliding_window == 128
    assert model.sliding_layers == 18
    assert model.expert_bytes == 4.25 / 8
    assert model.linear_bytes == 2


def test_kv_bytes() -> None:
    """Published: 320 KiB per token for Llama-3-70B, and heads replicate beyond their number."""
    model = models.load("llama-3-70b")
    assert [model.kv_bytes_per_token(degree) for degree in (1, 2, 8)] == [327_680, 163_840, 40_960]
    assert model.kv_bytes_per_token(16) == model.kv_bytes_per_token(8)


GEMMA4 = {
    **SMALL,
    "num_hidden_layers": 60,
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
}


def test_kv_bytes_of_layers_with_other_heads() -> None:
    """50 layers have 16 KV heads of 256, 10 have 4 of 512; on eight devices these have one each."""
    model = models.from_config("gemma-4-31b", GEMMA4, "f")
    assert model.kv_bytes_per_token(1) == 4 * (50 * 16 * 256 + 10 * 4 * 512)
    assert model.kv_bytes_per_token(8) == 4 * (50 * 2 * 256 + 10 * 512)


def test_fewest_heads_of_any_layer_bound_tokens_of_blocks() -> None:
    model = models.from_config("gemma-4-31b", GEMMA4, "f")
    machine = Modelled(model, hardware.parse_devices("h200x8"))
    assert machine.engine(1, (1, 2, 4, 8), 1).block_tokens == {1: 16, 2: 32, 4: 64, 8: 64}


@given(NAMES, DEGREES)
def test_devices_hold_the_model_once_plus_undivided_tensors(name: str, degree: int) -> None:
    """Shards add up to the weights, plus the copies of what is not divided."""
    model = models.load(name)
    total, copies = model.weight_bytes(1), degree * model.weight_bytes(degree)
    whole = 2 * model.layers * model.hidden * (2 + model.experts)
    replicated = max(0, degree - model.kv_heads) * 4 * model.layers * model.hidden * model.head_dim
    assert copies - total == pytest.approx((degree - 1) * whole + replicated, rel=1e-9, abs=1.0)


def test_config_is_read_from_a_file_or_folder(tmp_path: Path) -> None:
    """By file or by folder; defaults as in transformers; a multimodal model's text part."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    model = models.load(str(tmp_path))
    assert model == models.load(str(tmp_path / "config.json"))
    assert model == Model(tmp_path.name, 64, 2, 8, 4, 8, 128, 1000)
    assert models.from_config("x", {"text_config": SMALL}, "f").hidden == 64
    assert models.from_config("x", {**SMALL, "num_key_value_heads": None}, "f").kv_heads == 8
    fp8 = models.from_config("x", {**SMALL, "quantization_config": {"quant_method": "fp8"}}, "f")
    assert fp8.linear_bytes == 1
    assert fp8.expert_bytes == 1
    assert fp8.embedding_bytes == 2
    awq = models.from_config(
        "x", {**SMALL, "quantization_config": {"quant_method": "awq", "bits": 4}}, "f"
    )
    assert awq.linear_bytes == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size=0: must be an integer of at least 1"),
        ({"vocab_size": "1000"}, "vocab_size='1000'"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads=8"),
        ({"num_experts": 4}, "num_experts_per_tok is missing"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers=1: layers that use the KV of others"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512: multi-head latent attention is not covered"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quantization_config.quant_method='hqq'",
        ),
    ],
)
def test_refused_config_is_named_by_file_and_field(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**SMALL, **change}), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        models.load(str(file))
    assert message in str(caught.value)
    assert str(file) in str(caught.value)


def test_unknown_names_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="model='llama-9': neither a file nor one of gpt-oss-120b, llama-2-70b"
    ):
        models.load("llama-9")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="is no JSON file"):
        models.load(str(tmp_path))
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="one JSON object"):
        models.load(str(tmp_path))
