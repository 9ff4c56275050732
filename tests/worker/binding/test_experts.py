"""Routed experts in units: each rank of a lane computes its columns of every expert."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from flying_serving.vllm_adapter.loading import keep_weights
from flying_serving.worker.binding.share import SharedWeights
from flying_serving.worker.lane import lane_config
from tests.worker.configurations import GPT_OSS, QWEN2_MOE, configuration
from tests.worker.loaded import alone, load, random, tree

pytestmark = pytest.mark.usefixtures("classes_imported_here")

WIDEST = 4
EXPERTS = 4
TOKENS = 3
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-moe": QWEN2_MOE | {"moe_intermediate_size": 128},
    "gpt-oss": GPT_OSS | {"num_local_experts": EXPERTS},
}
ROUTING = {
    "topk_weights": torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]]),
    "topk_ids": torch.tensor([[0, 1], [2, 3], [3, 1]], dtype=torch.int32),
}
Loaded = dict[str, torch.Tensor]


def routed(model: nn.Module) -> RoutedExperts:
    return next(layer for layer in model.modules() if isinstance(layer, RoutedExperts))


def loaded_experts(model: nn.Module) -> Loaded:
    """Load a model; return copies of the tensors of its first layer's experts, whose outputs are
    about as large as their inputs.
    """
    load(model)
    parameters = dict(routed(model).named_parameters(recurse=False))
    for key, tensor in parameters.items():
        if key.endswith("_weight"):
            tensor.data.mul_(tensor.shape[-1] ** -0.5)
    return {key: tensor.data.clone() for key, tensor in parameters.items()}


def lane_outputs(config: VllmConfig, lane1: nn.Module, x: torch.Tensor) -> dict[int, torch.Tensor]:
    """What the ranks of each lane compute, by degree: (ranks, tokens, hidden)."""
    outputs: dict[int, list[torch.Tensor]] = {1: [], 2: [], WIDEST: []}
    lanes = {size: [tree(config, size) for _ in range(size)] for size in (2, WIDEST)}
    widest = lane_config(config, WIDEST, config.cache_config.block_size)
    with keep_weights(), set_current_vllm_config(widest):
        weights = SharedWeights(lane1, WIDEST, None)
    with set_current_vllm_config(widest):
        weights.share_experts(lanes[WIDEST][0], lane1)
    for size, models in ({1: [lane1]} | lanes).items():
        for rank, model in enumerate(models):
            if size > 1:
                weights.bind(model, rank, size)
            layer: Any = routed(model)
            apart = {"shared_experts": None, "shared_experts_input": None}
            outputs[size].append(layer.quant_method.apply(layer, x, **ROUTING, **apart))
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


@pytest.fixture(params=MODELS.values(), ids=MODELS)
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VllmConfig]:
    with alone(configuration(tmp_path, request.param)) as config:
        yield config


def test_each_rank_computes_its_columns_of_every_expert(config: VllmConfig) -> None:
    """The bias of the down projection is in the first rank's part alone."""
    lane1 = tree(config, 1)
    loaded, x = loaded_experts(lane1), random(TOKENS, 64)
    total = loaded["w2_weight"].shape[2]
    for size, parts in lane_outputs(config, lane1, x).items():
        width = total // size
        for rank, part in enumerate(parts):
            columns = slice(rank * width, (rank + 1) * width)
            expected = expected_part(loaded, x, columns, with_bias=rank == 0)
            torch.testing.assert_close(part, expected, msg=lambda text: f"{rank} of {size}: {text}")
