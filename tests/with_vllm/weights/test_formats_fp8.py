"""Lanes over vLLM's FP8 kernels of CUDA, whose products are in plain torch here: each layer
multiplies as that of stock vLLM's rank with the same kernels.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.model_executor.kernels import linear
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fusion.fused_act_quant import maybe_fused_act_quant
from vllm.model_executor.layers.fusion.quant_activation import QuantizedActivation
from vllm.model_executor.layers.linear import LinearBase
from vllm.utils.deep_gemm import DeepGemmQuantScaleFMT

from flying_lab.tiny_models.checkpoint import Shape
from flying_serving.errors import WeightError
from flying_serving.vllm_adapter.patches import installer
from flying_serving.weights.formats import kernel_of
from flying_serving.weights.kinds import check_cuts
from flying_serving.weights.share import SharedWeights
from flying_serving.worker import weightless_model
from harness.fp8_cpu.kernel import register
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
from tests.with_vllm.worker.loaded import alone, random, tree

pytestmark = pytest.mark.usefixtures("classes_imported_here", "installed")

ROUNDED = {WIDE: 1e-5, NARROW: 1e-2}
BLOCKS = partial(Shape, hidden=512, intermediate=512, heads=4, layers=1, quantized="fp8-block")
"""Four ranks have one head of 128 numbers each: one block with one scale."""
COMPRESSED = partial(BLOCKS, quantized="fp8-compressed-block")
WHOLE = {
    "weights": (SMALL(quantized="fp8"), NARROW),
    "weights-in-float32": (SMALL(quantized="fp8"), WIDE),
    "weights-and-inputs": (SMALL(quantized="fp8-static"), NARROW),
    "weights-and-inputs-mqa": (SMALL(quantized="fp8-static", kv_heads=1), WIDE),
    "outputs": (SMALL(quantized="fp8-channel"), NARROW),
    "outputs-mqa": (SMALL(quantized="fp8-channel", kv_heads=1), WIDE),
    "outputs-with-biases": (SMALL(quantized="fp8-channel", family="qwen2"), WIDE),
}
OF_BLOCKS = {
    kind.__name__: kind
    for kind in (
        linear.CutlassFp8BlockScaledMMKernel,
        linear.DeepGemmFp8BlockScaledMMKernel,
        linear.FlashInferFp8DeepGEMMDynamicBlockScaledKernel,
        linear.TritonFp8BlockScaledMMKernel,
    )
}
Use = Callable[..., None]


@pytest.fixture
def installed(unpatched: None) -> None:
    """The hooks that keep weights as they were loaded."""
    installer.install()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Let vLLM choose kernels as on CUDA; an argument is the kernel for blocks."""
    return partial(register, monkeypatch.setattr)


@pytest.mark.parametrize(("shape", "dtype"), WHOLE.values(), ids=WHOLE)
def test_lane_with_a_scale_for_each_weight_or_output_is_as_stock(
    shape: Shape, dtype: str, use: Use, tmp_path: Path
) -> None:
    use()
    require_near(worst_differences(configuration(tmp_path, shape, dtype)), ROUNDED[dtype])


@pytest.mark.parametrize("kind", OF_BLOCKS.values(), ids=OF_BLOCKS)
def test_lane_with_a_scale_for_each_block_is_as_stock(kind: type, use: Use, tmp_path: Path) -> None:
    use(kind)
    require_near(worst_differences(configuration(tmp_path, BLOCKS(), NARROW)), ROUNDED[NARROW])


@pytest.mark.parametrize("shape", [BLOCKS(kv_heads=2), COMPRESSED(), BLOCKS(family="qwen2")])
def test_lane_with_blocks_is_as_stock_in_other_shapes(
    shape: Shape, use: Use, tmp_path: Path
) -> None:
    """Ranks that share KV heads, a checkpoint of compressed-tensors, and biases."""
    use()
    require_near(worst_differences(configuration(tmp_path, shape, NARROW)), ROUNDED[NARROW])


def test_lane_takes_inputs_that_an_activation_has_rounded(use: Use, tmp_path: Path) -> None:
    """Where the scale is the checkpoint's, vLLM's activation rounds for the next layer."""
    use()
    config = configuration(tmp_path, SMALL(quantized="fp8-static"), NARROW)
    with alone(config):
        lane1, lane = loaded(config, 0, 1), tree(config, WIDEST)
        shared(config, lane1, lane).bind(lane, 0, WIDEST)
    mlp: Any = lane.get_submodule("model.layers.0.mlp")
    gate_up = random(5, 2 * mlp.down_proj.input_size_per_partition).bfloat16()
    rounded: Any = maybe_fused_act_quant(mlp.act_fn, gate_up, mlp.down_proj)
    assert isinstance(rounded, QuantizedActivation)
    plain = outputs(mlp.down_proj, SiluAndMul.forward_native(gate_up))
    assert torch.equal(outputs(mlp.down_proj, rounded), plain)


@pytest.mark.parametrize("shape", [SMALL(quantized="fp8-channel"), BLOCKS()])
def test_lanes_take_the_memory_of_stocks_model(shape: Shape, use: Use, tmp_path: Path) -> None:
    """Copies of the scales of blocks are one in 4,096 of a weight."""
    use()
    config = configuration(tmp_path, shape, NARROW)
    with alone(config):
        stock, lane1 = (loaded(config, 0, 1) for _ in range(2))
        lanes = {size: tree(config, size) for size in (2, WIDEST)}
        weights = shared(config, lane1, lanes[WIDEST])
        for size, lane in lanes.items():
            weights.bind(lane, 0, size)
    assert storage_bytes((weights, lane1, lanes)) <= 1.05 * storage_bytes(stock)


@pytest.mark.parametrize("shape", [SMALL(quantized="fp8"), SMALL(quantized="fp8-static"), BLOCKS()])
def test_groups_of_all_sizes_are_offered(shape: Shape, use: Use, tmp_path: Path) -> None:
    use()
    assert weightless_model.obstacles(configuration(tmp_path, shape, NARROW), (2, WIDEST)) == {}


REFUSED: dict[str, tuple[Shape, str]] = {
    "blocks-of-outputs": (
        BLOCKS(heads=8),
        r"qkv_proj: a unit of 64 outputs is no multiple of 128, the size of the blocks with one "
        "scale",
    ),
    "blocks-of-a-fused-layer": (
        BLOCKS(hidden=1024, heads=8, kv_heads=8, intermediate=640),
        r"gate_up_proj: a unit of 160 outputs is no multiple of 128",
    ),
    "aligned-outputs": (
        SMALL(quantized="fp8-channel", intermediate=160, hidden=128),
        r"gate_up_proj: a unit of 40 outputs is no multiple of 16, the size of the kernel's blocks",
    ),
    "aligned-inputs": (
        SMALL(quantized="fp8-channel", family="qwen3", hidden=130, heads=4),
        r"qkv_proj: a unit of 130 inputs is no multiple of 16, the size of the kernel's blocks",
    ),
}


@pytest.mark.parametrize(("shape", "reason"), REFUSED.values(), ids=REFUSED)
def test_units_that_a_kernel_cannot_multiply_with_are_refused(
    shape: Shape, reason: str, use: Use, tmp_path: Path
) -> None:
    use()
    config = configuration(tmp_path, shape, NARROW)
    with alone(config), pytest.raises(WeightError, match=reason):
        check_cuts(tree(config, 1), WIDEST)


def test_scales_that_deep_gemm_packs_are_refused(
    use: Use, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on GPUs after Hopper."""
    use(linear.DeepGemmFp8BlockScaledMMKernel)
    packed = DeepGemmQuantScaleFMT.UE8M0
    monkeypatch.setattr(DeepGemmQuantScaleFMT, "_oracle_cache", packed, raising=False)
    config = configuration(tmp_path, BLOCKS(), NARROW)
    with alone(config), pytest.raises(WeightError, match="set VLLM_USE_DEEP_GEMM=0"):
        check_cuts(tree(config, 1), 2)


def test_an_engine_without_groups_keeps_layers_as_vllm_has_made_them(
    use: Use, tmp_path: Path
) -> None:
    """CUTLASS's kernel pads sizes that no group could have."""
    use()
    shape = SMALL(quantized="fp8-channel", intermediate=40)
    config = configuration(tmp_path, shape, NARROW)
    with alone(config):
        lane1 = loaded(config, 0, 1)
        layers = [layer for layer in lane1.modules() if isinstance(layer, LinearBase)]
        methods = [layer.quant_method for layer in layers]
        SharedWeights(lane1, 1, None)
        down: Any = lane1.get_submodule("model.layers.0.mlp.down_proj")
    assert [layer.quant_method for layer in layers] == methods
    assert down.weight.shape[0] == 48
    assert type(kernel_of(down)) is linear.CutlassFP8ScaledMMLinearKernel
