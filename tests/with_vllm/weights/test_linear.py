"""Lanes over weights that are not packed: each layer computes its part of the layer as loaded."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
)

from flying_serving.errors import WeightError
from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from flying_serving.vllm_adapter.weights.loading import keep_weights
from flying_serving.weights import experts
from flying_serving.weights.gated import ActivationByUnit
from flying_serving.weights.linear import ColumnParallel
from flying_serving.weights.plain import storages
from flying_serving.weights.rule import layers_of
from flying_serving.weights.share import SharedWeights
from tests.unit.memory.layers import numbers, rows_of_rank
from tests.with_vllm.worker.configurations import (
    FALCON,
    LLAMA,
    OPT,
    QWEN2_MOE,
    configuration,
    small,
)
from tests.with_vllm.worker.loaded import alone, load, nested, tree

pytestmark = pytest.mark.usefixtures("classes_imported_here")

WIDEST = 4
QWEN2 = small("Qwen2", "qwen2", intermediate_size=120)
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-two-kv-heads": LLAMA | {"num_key_value_heads": 2},
    "llama-mqa": LLAMA | {"num_key_value_heads": 1},
    "llama-tied": LLAMA | {"tie_word_embeddings": True},
    "qwen2-with-biases": QWEN2,
    "opt-that-is-not-gated": OPT,
    "falcon-that-adds-biases-itself": FALCON | {"alibi": False},
    "qwen2-moe": QWEN2_MOE,
}
Loaded = dict[str, tuple[torch.Tensor, torch.Tensor | None]]


def load_numbers(model: nn.Module) -> Loaded:
    """Give columns whole numbers, so that sums are exact in any order; return them by layer."""
    load(model)
    loaded: Loaded = {}
    for seed, (name, layer) in enumerate(model.named_modules()):
        if isinstance(layer, ColumnParallelLinear):
            layer.weight.data.copy_(numbers(seed, *layer.weight.shape))
            if layer.bias is not None:
                layer.bias.data.copy_(numbers(seed + 1, *layer.bias.shape))
            bias = None if layer.bias is None else layer.bias.data.clone()
            loaded[name] = layer.weight.data.clone(), bias
    return loaded


def lanes(config: VllmConfig, lane1: nn.Module, rank: int) -> dict[int, nn.Module]:
    """All lanes of the engine of this rank in the widest group, over the weights of lane 1."""
    others = {size: tree(config, size) for size in (2, WIDEST)}
    widest = lane_config(config, WIDEST, config.cache_config.block_size)
    with keep_weights(), set_current_vllm_config(widest):
        weights = SharedWeights(lane1, WIDEST, None)
        weights.complete(others[WIDEST])
        for size, lane in others.items():
            weights.bind(lane, rank % size, size)
    return {1: lane1} | others


def module_of(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


@pytest.mark.parametrize("rank", range(WIDEST))
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_columns_of_each_lane_are_those_of_the_layer_as_loaded(
    model: dict[str, Any], rank: int, tmp_path: Path
) -> None:
    """Exactly, after outputs that the activation reads by unit are put in order."""
    config = configuration(tmp_path, model)
    with alone(config):
        lane1 = tree(config, 1)
        loaded = load_numbers(lane1)
        columns = [layer for layer in layers_of(lane1) if layer.name in loaded]
        segments = {layer.name: ColumnParallel.cut(layer, WIDEST) for layer in columns}
        for size, lane in lanes(config, lane1, rank).items():
            for name, (weight, bias) in loaded.items():
                layer: Any = lane.get_submodule(name)
                x = numbers(9, 3, weight.shape[1])
                rows = rows_of_rank(segments[name], rank % size, size)
                added = None if layer.skip_bias_add else bias
                expected, out = linear(x, weight, added)[:, rows], layer(x)[0]
                act = getattr(module_of(lane, name), "act_fn", None)
                if isinstance(act, ActivationByUnit):
                    out = out.view(3, act.units, 2, -1).transpose(1, 2).reshape(3, -1)
                assert torch.equal(out, expected), (size, name)
                if layer.skip_bias_add and bias is not None:
                    assert torch.equal(layer.bias, bias[rows]), (size, name)


def test_feed_forward_layers_read_units_where_there_are_several(tmp_path: Path) -> None:
    config = configuration(tmp_path, LLAMA)
    with alone(config):
        lane1 = tree(config, 1)
        load(lane1)
        found = {
            size: [layer.units for layer in lane.modules() if isinstance(layer, ActivationByUnit)]
            for size, lane in lanes(config, lane1, 0).items()
        }
    assert found == {1: [4, 4], 2: [2, 2], 4: []}


def test_fused_weights_are_reordered_in_their_own_memory(tmp_path: Path) -> None:
    """A layer keeps no weight whose rows are in another order than the model expects."""
    config = configuration(tmp_path, LLAMA)
    with alone(config):
        lane1 = tree(config, 1)
        load(lane1)
        fused = {
            name: layer
            for name, layer in lane1.named_modules()
            if isinstance(layer, MergedColumnParallelLinear | QKVParallelLinear)
        }
        before = {name: layer.weight.data_ptr() for name, layer in fused.items()}
        weights = SharedWeights(lane1, WIDEST, None)
        assert len(fused) == 4
        for name, layer in fused.items():
            assert before[name] in storages(weights._layers[name].made)
            assert layer.weight.numel() == 0


def test_weight_that_two_layers_share_is_reordered_once(tmp_path: Path) -> None:
    with alone(configuration(tmp_path, LLAMA)):
        first, second = (MergedColumnParallelLinear(8, [16, 16], bias=False) for _ in range(2))
        second.weight = first.weight
        model = nested(first=first, second=second)
        loaded = load_numbers(model)
        SharedWeights(model, WIDEST, None)
        x = numbers(1, 3, 8)
        for layer in (first, second):
            assert torch.equal(layer(x)[0], linear(x, loaded["second"][0]))


def test_weight_that_two_layers_cut_differently_is_refused(tmp_path: Path) -> None:
    with alone(configuration(tmp_path, LLAMA)):
        first = MergedColumnParallelLinear(8, [16, 16], bias=False)
        second = MergedColumnParallelLinear(8, [8, 24], bias=False)
        second.weight = first.weight
        model = nested(first=first, second=second)
        load(model)
        with pytest.raises(WeightError, match=r"second: another layer has the same weight"):
            SharedWeights(model, WIDEST, None)


def test_quantized_layer_is_refused(tmp_path: Path) -> None:
    with alone(configuration(tmp_path, LLAMA)):
        layer = MergedColumnParallelLinear(8, [16, 16], bias=False)
        layer.quant_method = object()
        with pytest.raises(WeightError, match="the format of object cannot be cut"):
            SharedWeights(nested(layer=layer), WIDEST, None)


def test_experts_are_released_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that at most one layer's experts are there twice."""
    there: list[int] = []
    config = configuration(tmp_path, QWEN2_MOE)
    with alone(config):
        lane1 = tree(config, 1)
        load(lane1)
        loaded = [
            weakref.ref(layer.w13_weight)
            for layer in lane1.modules()
            if isinstance(layer, RoutedExperts)
        ]
        cut = experts.expert_units

        def counted(*args: Any) -> Any:
            there.append(sum(weight() is not None for weight in loaded))
            return cut(*args)

        monkeypatch.setattr(experts, "expert_units", counted)
        lanes(config, lane1, 0)
        assert [weight() for weight in loaded] == [None, None]
    assert there == [2, 1]


def test_experts_of_a_monolithic_kernel_are_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(tmp_path, QWEN2_MOE)
    with alone(config):
        lane1 = tree(config, 1)
        load(lane1)
        monkeypatch.setattr(UnquantizedFusedMoEMethod, "is_monolithic", True)
        with pytest.raises(WeightError, match=r"experts: the kernel CPU .*monolithic"):
            lanes(config, lane1, 0)
