"""Lanes over quantized weights: each layer multiplies as that of stock vLLM's rank, which loads its
own part of the checkpoint.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization.utils import w8a8_utils

from flying_lab.tiny_models.checkpoint import Shape
from flying_serving.errors import WeightError
from flying_serving.vllm_adapter.patches import installer
from flying_serving.vllm_adapter.weights.loading import RandomWeights
from flying_serving.weights.formats import FORMATS
from flying_serving.weights.kinds import check_cuts
from flying_serving.weights.share import SharedWeights
from tests.unit.memory.layers import plain_pack
from tests.with_vllm.weights.quantized_lanes import (
    NARROW,
    SMALL,
    WIDE,
    WIDEST,
    configuration,
    loaded,
    outputs,
    require_near,
    shared,
    storage_bytes,
    worst_differences,
)
from tests.with_vllm.worker.loaded import alone, random, tree, written

pytestmark = pytest.mark.usefixtures("classes_imported_here", "installed", "fp8_in_torch")

FP8_MAX = 448.0
ROUNDED, ADDED_IN_FLOAT32, EXACT = 2e-2, 1e-5, 0.0
"""How far a sum of products of units may be from one product, beside the largest output."""
CASES = {
    "w4a16": (SMALL(quantized="w4a16"), NARROW, ROUNDED),
    "w4a16-asymmetric": (SMALL(quantized="w4a16-asymmetric"), NARROW, ROUNDED),
    "w4a16-channel": (SMALL(quantized="w4a16-channel"), NARROW, ROUNDED),
    "w4a16-mqa": (SMALL(quantized="w4a16", kv_heads=1), NARROW, ROUNDED),
    "w4a16-with-biases": (SMALL(quantized="w4a16", family="qwen2"), NARROW, ROUNDED),
    "gptq": (SMALL(quantized="gptq"), NARROW, ROUNDED),
    "awq": (SMALL(quantized="awq"), NARROW, ROUNDED),
    "int8": (SMALL(quantized="int8"), WIDE, ADDED_IN_FLOAT32),
    "int8-in-bfloat16": (SMALL(quantized="int8"), NARROW, 1 / 256),
    "int8-mqa": (SMALL(quantized="int8", kv_heads=1), WIDE, ADDED_IN_FLOAT32),
    "int8-with-biases": (SMALL(quantized="int8", family="qwen2"), WIDE, ADDED_IN_FLOAT32),
    "fp8-channel": (SMALL(quantized="fp8-channel"), WIDE, EXACT),
    "fp8": (SMALL(quantized="fp8"), NARROW, EXACT),
    "fp8-mqa": (SMALL(quantized="fp8", kv_heads=1), NARROW, EXACT),
    "fp8-channel-mqa": (SMALL(quantized="fp8-channel", kv_heads=1), WIDE, EXACT),
    "fp8-channel-with-biases": (SMALL(quantized="fp8-channel", family="qwen2"), WIDE, EXACT),
}


@pytest.fixture
def installed(unpatched: None) -> None:
    """The hooks that keep weights as they were loaded."""
    installer.install()


@pytest.fixture
def fp8_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation with which vLLM gives the weights of a fused layer one scale: it has none for
    the CPU.
    """

    def quantize(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale

    monkeypatch.setattr(w8a8_utils.ops, "scaled_fp8_quant", quantize)


@pytest.mark.deep
@pytest.mark.parametrize(("shape", "dtype", "rounding"), CASES.values(), ids=CASES)
def test_layer_of_a_lane_multiplies_as_stocks_rank(
    shape: Shape, dtype: str, rounding: float, tmp_path: Path
) -> None:
    require_near(worst_differences(configuration(tmp_path, shape, dtype)), rounding)


@pytest.mark.parametrize("quantized", ["w4a16", "awq", "fp8-channel", "fp8"])
def test_all_lanes_take_the_memory_of_stocks_model(quantized: str, tmp_path: Path) -> None:
    config = configuration(tmp_path, SMALL(quantized=quantized), NARROW)
    with alone(config):
        stock, lane1 = (loaded(config, 0, 1) for _ in range(2))
        lanes = {size: tree(config, size) for size in (2, WIDEST)}
        weights = shared(config, lane1, lanes[WIDEST])
        for size, lane in lanes.items():
            weights.bind(lane, 0, size)
    assert storage_bytes((weights, lane1, lanes)) <= 1.05 * storage_bytes(stock)


REFUSED = {
    "outputs": (
        SMALL(quantized="w4a16", intermediate=192),
        r"gate_up_proj: a unit of 48 outputs is no multiple of 32, the size of the kernel's blocks",
    ),
    "groups": (
        SMALL(quantized="w4a16-wide"),
        r"o_proj: a unit of 64 inputs is no multiple of 128, the size of the groups with one scale",
    ),
    "inputs": (
        SMALL(quantized="fp8-channel", intermediate=160, hidden=128),
        r"gate_up_proj: a unit of 40 outputs is no multiple of 16",
    ),
}


@pytest.mark.parametrize(("shape", "reason"), REFUSED.values(), ids=REFUSED)
def test_units_that_the_kernel_cannot_multiply_with_are_refused(
    shape: Shape, reason: str, tmp_path: Path
) -> None:
    """By name, before any weight is loaded."""
    config = configuration(tmp_path, shape, NARROW)
    with alone(config), pytest.raises(WeightError, match=reason):
        check_cuts(tree(config, 1), WIDEST)


def test_quantized_weights_are_not_lent(tmp_path: Path) -> None:
    config = configuration(tmp_path, SMALL(quantized="w4a16"), NARROW)
    with alone(config):
        lane1 = loaded(config, 0, 1)
        with pytest.raises(WeightError, match="quantized weights cannot be lent"):
            SharedWeights(lane1, WIDEST, plain_pack, written(tmp_path))


def test_lane_1_keeps_a_kernel_that_is_not_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine without groups serves it as vLLM does; groups are refused."""
    monkeypatch.delitem(FORMATS, "CPUWNA16LinearKernel")
    config = configuration(tmp_path, SMALL(quantized="w4a16"), NARROW)
    with alone(config):
        lane1 = loaded(config, 0, 1)
        layer: Any = lane1.get_submodule("model.layers.0.mlp.down_proj")
        method = layer.quant_method
        SharedWeights(lane1, 1, None)
        assert layer.quant_method is method
        with pytest.raises(WeightError, match="the format of CPUWNA16LinearKernel"):
            check_cuts(lane1, 2)


@pytest.mark.parametrize(
    "quantized",
    [
        *("w4a16", "gptq", "awq", "int8", "fp8-channel"),
        pytest.param("fp8", marks=pytest.mark.deep),  # two seconds on some processors
    ],
)
def test_random_weights_keep_the_size_of_inputs(quantized: str, tmp_path: Path) -> None:
    """Those with which `doctor` checks a model: each layer matters, and nothing overflows."""
    config = configuration(tmp_path, SMALL(quantized=quantized), NARROW)
    load = RandomWeights(config.load_config).load_weights
    with alone(config):
        models = [loaded(config, 0, 1, load) for _ in range(2)]
        for name, layer in models[0].named_modules():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                x = random(5, layer.input_size_per_partition).to(torch.bfloat16)
                out = outputs(layer, x)
                assert 0.3 < out.std() / x.std() < 3, name
                assert torch.equal(out, outputs(models[1].get_submodule(name), x)), name
