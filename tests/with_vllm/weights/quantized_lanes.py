"""Lanes over quantized weights, and vLLM's own ranks of the same model."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    RowParallelLinear,
)
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

from flying_lab.tiny_models.checkpoint import Shape, make_model
from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from flying_serving.vllm_adapter.patches.tensor_parallel import activate
from flying_serving.vllm_adapter.weights.loading import keep_weights
from flying_serving.vllm_adapter.weights.trees import _FirstOf, parallel_state
from flying_serving.weights.gated import ActivationByUnit
from flying_serving.weights.plain import reachable
from flying_serving.weights.share import SharedWeights
from tests.with_vllm.worker.loaded import alone, random, tree

WIDEST = 4
SMALL = partial(Shape, layers=1)
NARROW, WIDE = "bfloat16", "float32"


def configuration(path: Path, shape: Shape, dtype: str) -> VllmConfig:
    model = make_model(path / "model", shape)
    args = EngineArgs(
        model=str(model),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=256,
        skip_tokenizer_init=True,
    )
    return args.create_engine_config()


class Rank(_FirstOf):
    """This process, as a rank of a tensor-parallel group that builds and loads its model."""

    def __init__(self, rank: int, degree: int) -> None:
        super().__init__(parallel_state.get_tp_group(), degree)
        self.rank_in_group = rank


def loaded(config: VllmConfig, rank: int, degree: int, load: Any = None) -> nn.Module:
    """Stock vLLM's model of a rank, with its weights. `load`: fills it with others."""
    of_rank = lane_config(config, degree, config.cache_config.block_size)
    dtype = set_default_torch_dtype(of_rank.model_config.dtype)
    with activate(Rank(rank, degree)), set_current_vllm_config(of_rank), dtype:
        model = initialize_model(of_rank, model_config=of_rank.model_config)
        load = load or get_model_loader(of_rank.load_config).load_weights
        load(model, of_rank.model_config)
        for layer in model.modules():
            if isinstance(layer, LinearBase):
                layer.quant_method.process_weights_after_loading(layer)
    return model


def shared(config: VllmConfig, lane1: nn.Module, widest: nn.Module) -> SharedWeights:
    with set_current_vllm_config(lane_config(config, WIDEST, config.cache_config.block_size)):
        weights = SharedWeights(lane1, WIDEST, None)
        weights.complete(widest)
    return weights


def outputs(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """What a layer's product gives, with the bias that it adds itself."""
    bias = None if layer.skip_bias_add else layer.bias
    if isinstance(layer, RowParallelLinear) and layer.tp_rank > 0:
        bias = None
    return layer.quant_method.apply(layer, x, bias)


def in_order(model: nn.Module, name: str, out: torch.Tensor) -> torch.Tensor:
    """The output of a layer by segment, if the activation reads it by unit."""
    act = getattr(model.get_submodule(name.rpartition(".")[0]), "act_fn", None)
    if isinstance(act, ActivationByUnit) and name.endswith("gate_up_proj"):
        return out.view(len(out), act.units, 2, -1).transpose(1, 2).reshape(out.shape)
    return out


def worst_differences(config: VllmConfig) -> dict[str, float]:
    """How far the outputs of each layer of each lane are from those of stock vLLM's rank, beside
    the largest: by the layer's name and the degree.
    """
    with alone(config):
        with keep_weights():
            lane1 = loaded(config, 0, 1)
        lanes = {size: [tree(config, size) for _ in range(size)] for size in (2, WIDEST)}
        weights = shared(config, lane1, lanes[WIDEST][0])
        for size, ranks in lanes.items():
            for rank, lane in enumerate(ranks):
                weights.bind(lane, rank, size)
        worst: dict[str, float] = {}
        for size, ranks in {1: [lane1], **lanes}.items():
            for rank, lane in enumerate(ranks):
                stock = loaded(config, rank, size)
                for name, layer in stock.named_modules():
                    if not isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                        continue
                    x = random(5, layer.input_size_per_partition).to(config.model_config.dtype)
                    expected = outputs(layer, x)
                    found = in_order(lane, name, outputs(lane.get_submodule(name), x))
                    assert found.shape == expected.shape
                    apart = (found - expected).abs().max() / expected.abs().max()
                    key = f"{name} {size}"
                    worst[key] = max(worst.get(key, 0.0), float(apart))
    return worst


def require_near(worst: dict[str, float], rounding: float) -> None:
    """Columns have no other order of additions; rows may."""
    columns = {key: value for key, value in worst.items() if "qkv" in key or "gate_up" in key}
    assert not any(columns.values()), columns
    assert max(worst.values()) <= rounding, worst


def storage_bytes(root: Any) -> int:
    """The bytes of all tensors that can be reached, each storage once."""
    storages = [tensor.untyped_storage() for _, tensor, _ in reachable(root)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
