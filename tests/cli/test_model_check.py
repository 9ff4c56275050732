"""`doctor MODEL`: what it says of a configuration is what serving it would show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.cli.model_check import Started, findings, layers_to_check
from tests.live import ENVIRONMENT, ROOT

DOCTOR_S = 280
SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
MIXED = ["sliding_attention", "full_attention"] * 3
GEMMA2 = {**SMALL, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 32, "sliding_window": 64}
OLMO2 = {**SMALL, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
GPT_OSS = {
    **SMALL,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 64,
    "layer_types": MIXED,
    "quantization_config": {"quant_method": "mxfp4"},
}
DEEPSEEK_V3 = {
    **SMALL,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
}
SERVED = ("group size 1  ok, longest context", "group size 2  ok, longest context", "the first 2 of 6 layers")


@pytest.mark.server
@pytest.mark.parametrize(
    ("config", "code", "says"),
    [
        pytest.param(GEMMA2, 0, SERVED, id="gemma2"),
        pytest.param(
            {**OLMO2, "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 192},
            0,
            (*SERVED, "not offered"),
            id="olmo2",
        ),
        pytest.param(GPT_OSS, 1, ("refused: --quantization: quantized models cannot be served",), id="gpt-oss"),
        pytest.param(DEEPSEEK_V3, 1, ("refused: --model: models with latent attention, MLA",), id="deepseek-v3"),
    ],
)
def test_a_configuration_alone_is_enough(
    tmp_path: Path, config: dict[str, Any], code: int, says: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    engines = "4" if "not offered" in says else "2"
    flags = (f"--data-parallel-size={engines}", "--load-format=dummy", "--kv-cache-memory-bytes=67108864")
    done = subprocess.run(
        [sys.executable, "-m", "flying_serving.cli.main", "doctor", str(tmp_path), *flags],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=DOCTOR_S,
        check=False,
    )
    said = " ".join(done.stdout.replace("  ", " \t").split(" \t"))
    assert done.returncode == code, done.stdout + done.stderr[-3000:]
    for text in says:
        assert text.replace("  ", " ") in " ".join(said.split()), done.stdout


@pytest.mark.parametrize(
    ("hf", "layers"),
    [
        ({}, 2),
        ({"layer_types": None}, 2),
        ({"layer_types": ["full_attention"] * 40}, 2),
        ({"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}, 6),
        ({"first_k_dense_replace": 3}, 4),
        ({"decoder_sparse_step": 4}, 4),
    ],
)
def test_the_first_layers_have_every_kind_among_them(hf: dict[str, Any], layers: int) -> None:
    assert layers_to_check(SimpleNamespace(**hf)) == layers


def test_the_table_counts_all_layers_and_pools_kv_in_groups() -> None:
    """A block of a group holds twice the tokens, and a request no more than the model takes."""
    model = SimpleNamespace(architecture="X", max_model_len=1000, get_total_num_kv_heads=lambda: 4)
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(block_size=32),
    )
    started = Started((1, 2), {4: "6 attention heads do not divide by 4"}, blocks=21, block_bytes=2**20, layers=(6, 6))
    rows = [(row.state, row.what, row.reason) for row in findings(config, started, 2**30, took_s=3.0)]
    assert rows == [
        ("ok", "X", "checked in 3 s"),
        ("ok", "weights", "1.00 GiB on each device"),
        ("ok", "KV cache", "0.02 GiB on each device, 21 blocks"),
        ("ok", "group size 1", "ok, longest context 640 tokens (its KV holds 640)"),
        ("ok", "group size 2", "ok, longest context 1000 tokens (its KV holds 1280)"),
        ("warn", "group size 4", "not offered: 6 attention heads do not divide by 4"),
    ]
