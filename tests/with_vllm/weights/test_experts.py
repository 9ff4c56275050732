"""Routed experts in units: each rank of a lane computes its columns of every expert."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUExpertsMxfp4
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

from flying_serving.errors import WeightError
from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from flying_serving.vllm_adapter.weights.loading import keep_weights
from flying_serving.weights.share import SharedWeights
from harness.mxfp4_cpu.kernel import numbers_of, register
from tests.with_vllm.worker.configurations import GPT_OSS, GPT_OSS_MXFP4, QWEN2_MOE, configuration
from tests.with_vllm.worker.loaded import alone, load, random, tree

pytestmark = pytest.mark.usefixtures("classes_imported_here")

WIDEST = 4
EXPERTS = 4
TOKENS = 3
FEW = {"num_local_experts": EXPERTS}
ROUTING = {
    "topk_weights": torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]]),
    "topk_ids": torch.tensor([[0, 1], [2, 3], [3, 1]], dtype=torch.int32),
}
Loaded = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Experts, the type that they are computed in, and the largest relative error of that type.

    `unit`: columns of an expert in a unit.
    """

    model: dict[str, Any]
    unit: int
    dtype: str = "float32"
    error: float = 1e-5
    kernel: Callable[[pytest.MonkeyPatch], None] = lambda _: None


def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give vLLM a kernel for MXFP4 in plain torch."""
    register(monkeypatch.setattr)


def of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM take its own kernel, which it has for AMX alone. It runs with bfloat16 of AVX-512,
    too.
    """
    monkeypatch.setattr(CPUExpertsMxfp4, "_supports_current_device", lambda: True)


MXFP4 = Case(GPT_OSS_MXFP4 | FEW, 96, kernel=in_torch)
CASES: dict[str, Case] = {
    "qwen2-moe": Case(QWEN2_MOE | {"moe_intermediate_size": 128}, 32),
    "gpt-oss": Case(GPT_OSS | FEW, 32),
    "gpt-oss-mxfp4": MXFP4,
}
if torch.cpu._is_avx512_bf16_supported():
    CASES["gpt-oss-mxfp4-by-the-kernel-of-vllm"] = replace(
        MXFP4, dtype="bfloat16", error=0.02, kernel=of_vllm
    )


def routed(model: nn.Module) -> RoutedExperts:
    return next(layer for layer in model.modules() if isinstance(layer, RoutedExperts))


def loaded_experts(model: nn.Module) -> Loaded:
    """Load a model; return the numbers of its first layer's experts, whose outputs are about as
    large as their inputs.
    """
    load(model)
    tensors = {key: each.data for key, each in routed(model).named_parameters(recurse=False)}
    numbers: Loaded = {}
    for key, tensor in tensors.items():
        if tensor.dtype is torch.uint8:
            if not key.endswith("_scale"):
                numbers[key] = numbers_of(tensor, tensors[f"{key}_scale"])
            continue
        if key.endswith("_weight"):
            tensor.mul_(tensor.shape[-1] ** -0.5)
        numbers[key] = tensor.float()
    return {key: tensor.clone() for key, tensor in numbers.items()}


def lane_outputs(config: VllmConfig, lane1: nn.Module, x: torch.Tensor) -> dict[int, torch.Tensor]:
    """What the ranks of each lane compute, by degree: (ranks, tokens, hidden)."""
    outputs: dict[int, list[torch.Tensor]] = {1: [], 2: [], WIDEST: []}
    lanes = {size: [tree(config, size) for _ in range(size)] for size in (2, WIDEST)}
    widest = lane_config(config, WIDEST, config.cache_config.block_size)
    with keep_weights(), set_current_vllm_config(widest):
        weights = SharedWeights(lane1, WIDEST, None)
    with set_current_vllm_config(widest):
        weights.complete(lanes[WIDEST][0])
    for size, models in ({1: [lane1]} | lanes).items():
        for rank, model in enumerate(models):
            if size > 1:
                weights.bind(model, rank, size)
            layer: Any = routed(model)
            apart = {"shared_experts": None, "shared_experts_input": None}
            out = layer.quant_method.apply(layer, x, **ROUTING, **apart)
            outputs[size].append(out.float())
    return {size: torch.stack(parts) for size, parts in outputs.items()}


def expected_part(loaded: Loaded, x: torch.Tensor, columns: slice, with_bias: bool) -> torch.Tensor:
    """What stock vLLM's rank computes that has these columns of each expert: (tokens, hidden)."""
    out = torch.zeros_like(x)
    for token, (weights, experts) in enumerate(zip(*ROUTING.values(), strict=True)):
        for weight, expert in zip(weights, experts.tolist(), strict=True):
            hidden = loaded["w13_weight"][expert] @ x[token]
            if "w13_bias" in loaded:
                hidden = hidden + loaded["w13_bias"][expert]
                gate, up = hidden[0::2].clamp(max=7.0), hidden[1::2].clamp(-7.0, 7.0)
                active = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                gate, up = hidden.chunk(2)
                active = nn.functional.silu(gate) * up
            part = loaded["w2_weight"][expert][:, columns] @ active[columns]
            if with_bias and "w2_bias" in loaded:
                part = part + loaded["w2_bias"][expert]
            out[token] += weight * part
    return out


@pytest.fixture(params=CASES.values(), ids=list(CASES))
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    case: Case = request.param
    case.kernel(monkeypatch)
    return case


@pytest.fixture
def config(case: Case, tmp_path: Path) -> Iterator[VllmConfig]:
    with alone(configuration(tmp_path, case.model, case.dtype)) as config:
        yield config


def test_each_rank_computes_its_columns_of_every_expert(case: Case, config: VllmConfig) -> None:
    """The bias of the down projection is in the first rank's part alone."""
    lane1 = tree(config, 1)
    loaded, x = loaded_experts(lane1), random(TOKENS, 64).to(config.model_config.dtype)
    for size, parts in lane_outputs(config, lane1, x).items():
        width = case.unit * WIDEST // size
        for rank, part in enumerate(parts):
            columns = slice(rank * width, (rank + 1) * width)
            expected = expected_part(loaded, x.float(), columns, with_bias=rank == 0)
            error = (part - expected).abs().max() / expected.abs().mean()
            assert error <= 3 * case.error, f"rank {rank} of {size}"


def test_kernel_that_routes_tokens_itself_is_refused_by_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    in_torch(monkeypatch)
    monkeypatch.setattr(GptOssMxfp4MoEMethod, "is_monolithic", True)
    with alone(configuration(tmp_path, MXFP4.model)) as config:
        lane1 = tree(config, 1)
        load(lane1)
        with pytest.raises(WeightError, match=r"experts: the kernel CPU .*monolithic.* marlin"):
            lane_outputs(config, lane1, random(TOKENS, 64))
