"""`doctor MODEL`: what it says of a configuration is what serving it would show."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flying_serving.cli import model_check, serve
from flying_serving.cli.model_check import findings
from flying_serving.errors import ConfigError, Unsupported
from flying_serving.memory.kv_groups import one_group
from flying_serving.worker.weightless_model import KVPlan, anatomy
from harness import mxfp4_cpu
from harness.forked import by_shell, run
from harness.live import Server
from tests.deep.cli.model_configs import LAST_EXPERTS, configured, small, written
from tests.with_vllm.worker.configurations import GEMMA3, GEMMA4, IDEFICS3, published_gpt_oss

pytestmark = pytest.mark.usefixtures("classes_imported_here")

DOCTOR_S = 120
"""Twice what it may take on a machine that has nothing else to do."""


GEMMA2 = small("Gemma2", "gemma2") | {"head_dim": 32, "sliding_window": 64}
OLMO2 = small("Olmo2", "olmo2")
SIX_HEADS = OLMO2 | {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 192}
GPT_OSS = published_gpt_oss(layers=6, experts=4) | {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "head_dim": 32,
}
"""Experts are as wide as they were published; all else is smaller."""
DEEPSEEK_V3 = small("DeepseekV3", "deepseek_v3") | {
    "num_key_value_heads": 8,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
}
HRM = small("HrmText", "hrm_text") | {
    "num_key_value_heads": 8,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "num_layers_per_stack": 2,
    "H_cycles": 2,
    "L_cycles": 3,
    "prefix_lm": True,
}
LAST_EXPERTS_OF_ERNIE = small("Ernie4_5_Moe", "ernie4_5_moe") | {
    "num_key_value_heads": 8,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_intermediate_size": 132,
    "moe_layer_start_index": 3,
    "moe_layer_end_index": 5,
}
GEMMA3N = small("Gemma3n", "gemma3n_text") | {
    "num_hidden_layers": 30,
    "num_kv_shared_layers": 10,
    "head_dim": 32,
    "intermediate_size": [512] * 30,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 512,
    "laurel_rank": 16,
    "sliding_window": 64,
}
NO_WEIGHTS = ("--data-parallel-size=2", "--load-format=dummy", "--kv-cache-memory-bytes=67108864")
NO_TOKENIZER = (
    "--load-format=dummy",
    "--skip-tokenizer-init",
    "--max-model-len=2048",
    "--dtype=float32",
)
BLOCK_BYTES = 2 * 128 * 192 * 4 * SIX_HEADS["num_hidden_layers"]


def command(name: str, model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return run([name, str(model), *flags], DOCTOR_S)


@pytest.mark.server
@pytest.mark.parametrize(
    ("config", "says"),
    [
        (DEEPSEEK_V3, "--model: latents and rotated keys of 80 numbers on a CPU cannot be served"),
        (HRM, "--model: models with attention that is not causal (HrmText"),
    ],
    ids=["deepseek-v3", "hrm"],
)
def test_a_configuration_alone_is_enough_to_refuse(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    done = command("doctor", written(tmp_path, config), *NO_WEIGHTS)
    assert done.returncode == 1, done.stdout + done.stderr[-3000:]
    assert f"refused: {says}" in " ".join(done.stdout.split()), done.stdout


@pytest.mark.server
def test_experts_of_gpt_oss_are_served_at_all_degrees(tmp_path: Path) -> None:
    """Its 90 blocks of an expert are cut into 23, 23, 23 and 21 for four engines."""
    model = written(tmp_path, GPT_OSS)
    flags = ("--data-parallel-size=4", *NO_WEIGHTS[1:], "--max-model-len=2048")
    done = run(["doctor", str(model), *flags], DOCTOR_S, mxfp4_cpu.PREAMBLE)
    said = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert all(f"group size {size} ok" in said for size in (1, 2, 4)), said


@pytest.mark.server
def test_doctor_reads_only_a_configuration_and_prints_only_its_table(tmp_path: Path) -> None:
    """Started by a shell: no line of vLLM's log stands beside the table."""
    done = by_shell(["doctor", str(written(tmp_path, GEMMA2)), *NO_WEIGHTS], DOCTOR_S)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    said = " ".join(done.stdout.split())
    assert "the first 2 of 6 layers" in said and "group size 2 ok, longest context 2048" in said, (
        done.stdout
    )
    assert "INFO" not in done.stdout + done.stderr


@pytest.mark.server
def test_sizes_and_contexts_equal_the_servers(tmp_path: Path) -> None:
    """Four engines cannot share six heads: the table says of them what the server's status does."""
    model = written(tmp_path, SIX_HEADS)
    flags = (*NO_TOKENIZER, "--kv-cache-memory-bytes=67108864")
    done = command("doctor", model, "--data-parallel-size=4", *flags)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    ok = {
        int(size): int(tokens)
        for size, tokens in re.findall(r"group size (\d) +ok, .*holds (\d+)\)", done.stdout)
    }
    refused = {
        size: text.strip()
        for size, text in re.findall(r"group size (\d) +not offered: (.*)", done.stdout)
    }
    with Server(model, 4, *flags, base=()) as server:
        status = server.status()
    assert list(ok) == status["group_sizes"] == [1, 2]
    assert refused == status["not_offered"] != {}
    assert {str(size): tokens for size, tokens in ok.items()} == status["capacity_tokens"]


@pytest.mark.server
def test_memory_that_serving_refuses_is_refused(tmp_path: Path) -> None:
    """Eight blocks of all layers do not hold the longest request in a group of two; of two layers
    they would.
    """
    model = written(tmp_path, SIX_HEADS)
    flags = ("--data-parallel-size=2", *NO_TOKENIZER, f"--kv-cache-memory-bytes={8 * BLOCK_BYTES}")
    checked, served = command("doctor", model, *flags), command("serve", model, *flags)
    assert checked.returncode == 1, checked.stdout
    assert served.returncode == 2, served.stderr[-3000:]
    refusal = " ".join(checked.stdout.split()).split("refused: ")[1]
    assert refusal.startswith("To serve at least one request with the model's max seq len (2048)")
    assert refusal in " ".join(served.stderr.split())


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        pytest.param(OLMO2, 2, id="all-alike"),
        pytest.param(LAST_EXPERTS, 4, id="experts-from-a-list"),
        pytest.param(LAST_EXPERTS_OF_ERNIE, 4, id="experts-from-an-index"),
        pytest.param(GEMMA3, 6, id="windows"),
        pytest.param(GEMMA4, 6, id="layers-with-other-heads"),
        pytest.param(GEMMA3N, 25, id="layers-that-use-the-KV-of-others"),
    ],
)
def test_the_first_layers_have_every_kind_among_them(
    tmp_path: Path, config: dict[str, Any], layers: int
) -> None:
    args, config_of_all = configured(tmp_path, config)
    whole = anatomy(config_of_all)
    fewer, part = model_check._shortened(args, config_of_all, whole)
    assert model_check._layers(fewer) == layers
    assert whole.kinds.keys() <= part.kinds.keys()


def test_the_text_of_a_model_that_sees_is_shortened(tmp_path: Path) -> None:
    args, config_of_all = configured(tmp_path, IDEFICS3, "--language-model-only")
    fewer, _ = model_check._shortened(args, config_of_all, anatomy(config_of_all))
    assert model_check._layers(config_of_all) == 6
    assert model_check._layers(fewer) == 2


def test_steps_are_shortened_only_where_prompts_may_be_cut(tmp_path: Path) -> None:
    """vLLM refuses steps that are shorter than a prompt may be, if a prompt takes one step."""
    args, whole = configured(tmp_path, OLMO2, "--no-enable-chunked-prefill")
    fewer = model_check._with_random_weights(args, whole, 2, {})
    assert (
        fewer.scheduler_config.max_num_batched_tokens
        == whole.scheduler_config.max_num_batched_tokens
    )
    args, whole = configured(tmp_path, OLMO2)
    fewer = model_check._with_random_weights(args, whole, 2, {})
    assert fewer.scheduler_config.max_num_batched_tokens == model_check.STEP_TOKENS


def engines_that_say(
    monkeypatch: pytest.MonkeyPatch, kv_bytes: int, free_bytes: int = 2**40
) -> None:
    """In place of engines, whose layers are all fine."""

    async def start(config: Any) -> tuple[tuple[int, ...], int, int]:
        return (
            tuple(config.additional_config["flying_serving"]["group_sizes"]),
            kv_bytes,
            free_bytes,
        )

    monkeypatch.setattr(model_check, "_start", start)


@pytest.mark.parametrize("config", [LAST_EXPERTS, LAST_EXPERTS_OF_ERNIE], ids=["qwen3", "ernie"])
def test_group_sizes_suit_all_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: dict[str, Any]
) -> None:
    engines_that_say(monkeypatch, 2**30)
    checked = model_check._check(*configured(tmp_path, config, "--data-parallel-size=8"))
    expert = (
        "model.layers.3.mlp.experts.routed_experts: 132 columns of an expert do not divide by 8"
    )
    assert checked.sizes == (1, 2, 4)
    assert checked.not_offered == {8: expert}
    assert checked.layers == (4, 6)


def test_kv_memory_is_the_memory_left_by_all_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engines had two of six layers: the weights of four were not there, and neither was their
    KV.
    """
    args, config = configured(tmp_path, SIX_HEADS, "--data-parallel-size=2", "--dtype=float32")
    missing = (
        anatomy(config).weight_bytes
        - anatomy(model_check._with_random_weights(args, config, 2, {})).weight_bytes
    )
    assert missing > 0
    engines_that_say(monkeypatch, missing + 10 * BLOCK_BYTES)
    checked = model_check._check(args, config)
    assert checked.plan == KVPlan(
        blocks=10, block_bytes=BLOCK_BYTES, groups=one_group(128), max_model_len=2048
    )
    engines_that_say(monkeypatch, missing + 8 * BLOCK_BYTES)
    with pytest.raises(
        ConfigError, match=r"^To serve at least one request with the model's max seq len"
    ):
        model_check._check(args, config)
    engines_that_say(monkeypatch, missing - 1)
    with pytest.raises(ConfigError, match=r"^No available memory for the cache blocks"):
        model_check._check(args, config)


def test_weights_that_do_not_fit_are_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory for KV was given as a number, so that the engines of fewer layers had all of it."""
    flags = ("--data-parallel-size=2", "--kv-cache-memory-bytes=67108864")
    args, config = configured(tmp_path, OLMO2, *flags)
    engines_that_say(monkeypatch, 2**26, free_bytes=2**30)
    assert model_check._check(args, config).lacking_bytes < 0
    engines_that_say(monkeypatch, 2**26, free_bytes=0)
    assert model_check._check(args, config).lacking_bytes > 0


def test_each_device_has_a_row_with_its_placement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    flags = (
        "--data-parallel-size=2",
        "--tensor-parallel-size=2",
        "--kv-cache-memory-bytes=67108864",
    )
    args, config = configured(tmp_path, OLMO2, *flags)
    engines_that_say(monkeypatch, 2**26)
    rows = list(findings(config, model_check._check(args, config), 1.0))[-4:]
    names = [f"engine {engine} device {device}" for engine in range(2) for device in range(2)]
    assert [row.what for row in rows] == names
    assert all(", any core, 3 threads" in row.reason for row in rows)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            Unsupported("--enable-lora: LoRA cannot be served by Flying Serving yet"),
            "--enable-lora: LoRA",
        ),
        (RuntimeError("two\nlines"), "RuntimeError: two lines"),
        (
            AttributeError("'X' object has no attribute 'y'"),
            "AttributeError: 'X' object has no attribute 'y'",
        ),
    ],
)
def test_any_failure_of_the_model_check_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    def fail(_: Any) -> Any:
        raise error

    monkeypatch.setattr(serve, "exec_with_allocator", lambda: None)
    monkeypatch.setattr(serve, "parse", lambda *_: SimpleNamespace(model="m"))
    monkeypatch.setattr(model_check, "_configuration", fail)
    (found,) = model_check.run(["m"])
    assert found.state == "bad"
    assert found.what == "m"
    assert found.reason.startswith(f"refused: {says}")
