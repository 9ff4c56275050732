"""Group sizes that real models admit, and what is said of the others."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform

from flying_serving.errors import ConfigError, WeightError
from flying_serving.memory.kv_groups import one_group
from flying_serving.server.start.support import adapt_caches
from flying_serving.vllm_adapter.weights.trees import first_of, module_tree, world_of_one
from flying_serving.weights.share import SharedWeights
from flying_serving.worker import weightless_model
from flying_serving.worker.weightless_model import KVPlan, anatomy, kv_plan, obstacles
from harness.experts_cpu.kernel import register as experts_in_torch
from harness.mxfp4_cpu.kernel import register
from tests.with_vllm.weights.expert_cases import CASES as EXPERTS_IN_TRITON
from tests.with_vllm.weights.expert_cases import configured
from tests.with_vllm.worker.configurations import (
    BLOOM,
    FALCON,
    GPT_OSS,
    LLAMA,
    OPT,
    QWEN2_MOE,
    configuration,
    published_gemma4,
    published_gpt_oss,
    small,
)

pytestmark = pytest.mark.usefixtures("classes_imported_here")


def undivided(layer: str, what: str, *sizes: int) -> dict[int, str]:
    return {size: f"model.{layer}: {what} do not divide by {size}" for size in sizes}


BIG_CODE = small(
    "GPTBigCode", "gpt_bigcode", n_embd=64, n_layer=2, n_head=8, n_positions=512, multi_query=True
)
EXPERTS = "model.layers.0.mlp.experts"
CASES: tuple[tuple[str, dict[str, Any], dict[int, str]], ...] = (
    ("all", LLAMA, {}),
    ("all-with-slopes-computed-while-building", BLOOM, {}),
    (
        "feed-forward",
        LLAMA | {"intermediate_size": 132},
        undivided("layers.0.mlp.gate_up_proj", "132 columns", 8),
    ),
    (
        "feed-forward-of-another-name",
        OPT | {"ffn_dim": 130},
        undivided("decoder.layers.0.fc1", "130 columns", 4, 8),
    ),
    (
        "heads",
        LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 4},
        {
            8: "model.layers.0.self_attn: AssertionError at `assert self.total_num_heads % "
            "tp_size == 0`"
        },
    ),
    (
        "experts",
        QWEN2_MOE,
        {8: "model.layers.0.mlp: Tensor parallel size 8 is greater than the number of experts 4."},
    ),
    (
        "shared-experts",
        QWEN2_MOE | {"shared_expert_intermediate_size": 66},
        undivided("layers.0.mlp.shared_expert.gate_up_proj", "66 columns", 4, 8),
    ),
    (
        "experts-themselves",
        QWEN2_MOE | {"num_experts": 8, "moe_intermediate_size": 68},
        undivided("layers.0.mlp.experts.routed_experts", "68 columns of an expert", 8),
    ),
    ("experts-that-can-be-shared", QWEN2_MOE | {"num_experts": 8}, {}),
    ("a-bias-of-a-fused-layer-that-the-model-adds", FALCON, {}),
    ("attention-without-a-plan-that-vllm-cuts", BIG_CODE, {}),
    (
        "attention-without-a-plan-that-vllm-keeps-whole",
        BIG_CODE | {"multi_query": False},
        dict.fromkeys(
            (2, 4, 8), "model.h.0.attn: vLLM splits its heads, and keeps its projections whole"
        ),
    ),
    (
        "experts-with-biases",
        GPT_OSS,
        {8: f"{EXPERTS}: No Unquantized MoE backend supports the deployment configuration."},
    ),
)


@pytest.mark.parametrize(
    ("model", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_sizes_that_do_not_divide_are_named_with_their_layer(
    model: dict[str, Any], expected: dict[int, str], tmp_path: Path
) -> None:
    """Each size by itself: a width that eight do not divide leaves four and two."""
    found = obstacles(configuration(tmp_path, model), (2, 4, 8))
    assert found == expected


def test_error_while_weights_are_shared_refuses_that_size_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever the last step of sharing says: as an engine that binds its lanes would."""
    refuse = SharedWeights.bind

    def bind(self: SharedWeights, model: torch.nn.Module, rank: int, degree: int) -> None:
        refuse(self, model, rank, degree)
        if degree == 4:
            raise WeightError(
                "model.norm.weight: shape (3,) in a lane is no part of (64,) in lane 1"
            )

    monkeypatch.setattr(SharedWeights, "bind", bind)
    found = obstacles(configuration(tmp_path, LLAMA), (2, 4, 8))
    assert found == {4: "model.norm.weight: shape (3,) in a lane is no part of (64,) in lane 1"}


def test_anatomy_is_of_one_engine(tmp_path: Path) -> None:
    """Two layers that are alike; 155,520 numbers, with what pads the vocabulary to 576."""
    found = anatomy(configuration(tmp_path, LLAMA))
    layer = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert found.weight_bytes == 4 * (2 * layer + 2 * 576 * 64 + 64)
    assert list(found.kinds.values()) == [0]


@pytest.mark.parametrize("experts", [32, 128], ids=["20b", "120b"])
def test_published_gpt_oss_is_offered_at_all_sizes(
    experts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer of each kind. Weights of experts count as many bytes as MXFP4 has. Their 90 blocks
    are cut unevenly by four and by eight.
    """
    layers = 2
    register(monkeypatch.setattr)
    config = configuration(tmp_path, published_gpt_oss(layers, experts), "bfloat16")
    hidden, heads, kv_heads = 2880, 64 * 64, 8 * 64
    rows = 3 * hidden  # gate and up, and down
    expert = rows * hidden // 2 + rows * hidden // 32 + 2 * rows
    attention = (heads + 2 * kv_heads) * (hidden + 1) + heads * hidden + hidden + 64
    router = experts * (hidden + 1)
    layer = experts * expert + 2 * (attention + router + 2 * hidden)
    assert anatomy(config).weight_bytes == layers * layer + 2 * (2 * 201088 + 1) * hidden
    assert obstacles(config, (2, 4, 8)) == {}


@pytest.mark.parametrize("kind", ["tensor-static", "channel", "block-of-128"])
def test_experts_in_fp8_are_offered_at_sizes_of_whole_blocks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four blocks of 128 columns, which eight engines would part."""
    experts_in_torch(monkeypatch.setattr)
    config = configured(tmp_path, EXPERTS_IN_TRITON[f"fp8-{kind}"])
    assert obstacles(config, (2, 4)) == {}
    if kind.startswith("block"):
        says = "routed_experts: a unit of 64 columns of an expert is no multiple of 128, the size"
        assert says in obstacles(config, (8,))[8]


def test_kv_is_planned_for_the_widest_group(tmp_path: Path) -> None:
    """Three blocks of 128 tokens, one of which vLLM keeps: 256 tokens in an engine, 512 in a group
    of two.
    """
    config = configuration(tmp_path, LLAMA)
    block_bytes = 2 * 2 * 128 * 64 * 4
    config.model_config.max_model_len = 512
    expected = KVPlan(blocks=3, block_bytes=block_bytes, groups=one_group(128), max_model_len=512)
    assert kv_plan(config, 3 * block_bytes, widest=2) == expected
    with pytest.raises(
        ConfigError, match=r"^To serve at least one request with the model's max seq len \(512\)"
    ):
        kv_plan(config, 3 * block_bytes, widest=1)


@pytest.mark.deep
def test_kv_of_published_gemma4_is_planned_by_the_size_of_each_layer(tmp_path: Path) -> None:
    """50 layers have 16 KV heads of 256, 10 have 4 of 512: a token has 880 KiB in bfloat16."""
    config = configuration(tmp_path, published_gemma4(), "bfloat16")
    adapt_caches(config)
    config.model_config.max_model_len = 512
    token_bytes = 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)
    assert token_bytes == 880 << 10
    plan = kv_plan(config, 5 * 128 * token_bytes + 1000, widest=4)
    assert plan == KVPlan(
        blocks=5, block_bytes=128 * token_bytes, groups=one_group(128), max_model_len=512
    )
    assert obstacles(config, (2, 4)) == {}


def test_a_model_that_vllm_cannot_build_is_left_to_its_engines(tmp_path: Path) -> None:
    config = configuration(tmp_path, LLAMA)
    config.model_config.hf_config.hidden_act = "nothing"
    assert obstacles(config, (2, 4)) == {}
    with world_of_one(config), pytest.raises(ValueError, match="nothing"):
        module_tree(config, torch.device("cpu"))


def test_slopes_are_those_of_the_rank(tmp_path: Path) -> None:
    """ALiBi's are numbers that the model computes while it is built, for the heads of its rank."""
    config = configuration(tmp_path, BLOOM)
    config.parallel_config.data_parallel_size = 1
    with world_of_one(config), first_of(2):
        tree = module_tree(config, torch.device("cpu"))
    attention = next(module for module in tree.modules() if isinstance(module, Attention))
    assert attention.impl.alibi_slopes.tolist() == pytest.approx([2.0**-n for n in range(1, 5)])


def _sees_the_parent(*_: Any) -> dict[int, str]:
    return {2: "of a fork"}


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question is asked as on CUDA. A fork answers it by a stand-in, which is not imported."""
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    monkeypatch.setattr(obstacles, "__wrapped__", _sees_the_parent)


@pytest.mark.usefixtures("on_cuda")
def test_question_is_asked_of_a_fork_while_cuda_is_not_in_use() -> None:
    assert obstacles(VllmConfig(), (2,)) == {2: "of a fork"}


@pytest.mark.deep
@pytest.mark.parametrize("known", ["is_initialized", "_is_in_bad_fork"])
@pytest.mark.usefixtures("on_cuda")
def test_question_is_asked_of_a_new_process_where_cuda_is_in_use(
    known: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch knows before the fork, or only in it. The new process imports the real function."""
    monkeypatch.setattr(torch.cuda, known, lambda: True)
    config = configuration(tmp_path, LLAMA | {"intermediate_size": 132})
    assert obstacles(config, (8,)) == undivided("layers.0.mlp.gate_up_proj", "132 columns", 8)


def _fails(*_: Any) -> dict[int, str]:
    raise RuntimeError("no port\nis free")


def _ends(*_: Any) -> dict[int, str]:
    os._exit(3)


def _hangs(*_: Any) -> dict[int, str]:
    time.sleep(60)
    return {}


@pytest.mark.parametrize(
    ("examine", "says"),
    [
        (_fails, "--model: no port is free"),
        (_ends, "--model: the process that builds the model ended with 3"),
        (_hangs, "--model: the model was not built without weights within 1 s"),
    ],
)
def test_a_question_without_an_answer_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, examine: Any, says: str
) -> None:
    monkeypatch.setattr(obstacles, "__wrapped__", examine)
    monkeypatch.setattr(weightless_model, "DEADLINE_S", 20.0 if examine is not _hangs else 1.0)
    with pytest.raises(ConfigError, match=f"^{says}$"):
        obstacles(VllmConfig(), (2,))
