"""Experts in vLLM's Triton kernel: what each rank of stock vLLM computes with its own part of the
checkpoint, and what a rank of a lane computes with its slices.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from flying_serving.vllm_adapter.weights.loading import keep_weights
from flying_serving.weights.expert_forms import is_interleaved, is_ready
from flying_serving.weights.share import SharedWeights
from tests.with_vllm.worker.loaded import load, random, tree

WIDEST = 4
DEGREES = (1, 2, WIDEST)
TOKENS = 3
ROUTING = {
    "topk_weights": torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.125, 0.875]]),
    "topk_ids": torch.tensor([[0, 1], [2, 3], [3, 1]], dtype=torch.int32),
}
Outputs = dict[tuple[int, int], torch.Tensor]
"""(tokens, hidden), by degree and rank."""


def routed(model: nn.Module) -> Any:
    return next(layer for layer in model.modules() if isinstance(layer, RoutedExperts))


def loaded(config: VllmConfig) -> nn.Module:
    """The model of an engine alone. Weights of experts are such that outputs are about as large as
    inputs.
    """
    model = tree(config, 1)
    load(model)
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            for key, tensor in layer.named_parameters(recurse=False):
                if key.endswith(("_weight", "_scale", "_scale_inv")):
                    tensor.data = (tensor.data.float() / 8).to(tensor.dtype)
    return model


def outputs_of(model: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    layer = routed(model)
    x = random(TOKENS, layer.hidden_size).to(dtype)
    routing = {key: value.clone() for key, value in ROUTING.items()}
    apart = {"shared_experts": None, "shared_experts_input": None}
    out: torch.Tensor = layer.quant_method.apply(layer, x, **routing, **apart)
    return out.clone()


def rank_part(
    key: str, full: torch.Tensor, rank: int, degree: int, interleaved: bool
) -> torch.Tensor:
    """What vLLM loads into a rank's tensor of experts, in memory of its own."""
    if key == "w2_bias":
        return full.clone() if rank == 0 else torch.zeros_like(full)
    if key.startswith("w13_") and (full.dim() == 3 or key == "w13_bias"):
        segments = (full,) if interleaved else full.chunk(2, 1)
        return torch.cat([part.chunk(degree, 1)[rank] for part in segments], 1)
    if key.startswith("w2_") and full.dim() == 3 and full.shape[2] > 1:
        return full.chunk(degree, 2)[rank].clone()
    return full.clone()


def outputs_of_stock(config: VllmConfig, full: nn.Module) -> Outputs:
    """`full`: loaded, and not processed."""
    found: Outputs = {}
    for degree in DEGREES:
        for rank in range(degree):
            model = tree(config, degree)
            layer, whole = routed(model), routed(full)
            for key, tensor in list(layer.named_parameters(recurse=False)):
                part = rank_part(key, getattr(whole, key), rank, degree, is_interleaved(whole))
                assert part.shape == tensor.shape, key
                layer.register_parameter(key, Parameter(part, requires_grad=False))
            of_rank = lane_config(config, degree, config.cache_config.block_size)
            with set_current_vllm_config(of_rank):
                layer.quant_method.process_weights_after_loading(layer)
            found[degree, rank] = outputs_of(model, config.model_config.dtype)
    return found


def shared(
    config: VllmConfig, lane1: nn.Module
) -> tuple[SharedWeights, dict[tuple[int, int], nn.Module]]:
    """The weights of lane 1, which is loaded, and all models over them."""
    models = {(1, 0): lane1} | {
        (degree, rank): tree(config, degree) for degree in DEGREES[1:] for rank in range(degree)
    }
    widest = lane_config(config, WIDEST, config.cache_config.block_size)
    with set_current_vllm_config(config):
        for layer in lane1.modules():
            if isinstance(layer, RoutedExperts) and is_ready(layer):
                layer.quant_method.process_weights_after_loading(layer)
    with keep_weights(), set_current_vllm_config(widest):
        weights = SharedWeights(lane1, WIDEST, None)
    with set_current_vllm_config(widest):
        weights.complete(models[WIDEST, 0])
        for (degree, rank), model in models.items():
            if degree > 1:
                weights.bind(model, rank, degree)
    return weights, models


def outputs_of_lanes(config: VllmConfig, lane1: nn.Module) -> Outputs:
    """`lane1`: loaded. It is processed here."""
    dtype = config.model_config.dtype
    _, models = shared(config, lane1)
    return {place: outputs_of(model, dtype) for place, model in models.items()}


def largest_difference(config: VllmConfig) -> float:
    """The largest difference of a rank of a lane from stock's, beside the mean output."""
    stock = outputs_of_stock(config, loaded(config))
    lanes = outputs_of_lanes(config, loaded(config))
    assert stock.keys() == lanes.keys()
    return max(
        float((lanes[place] - out).abs().max() / out.abs().mean()) for place, out in stock.items()
    )
