"""Lane 1 is compiled and the lanes of groups are not; a packed product is one operation of the
compiled code.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context

from flying_serving.vllm_adapter.model_runner.compiled import HiddenProduct, is_compiled, uncompiled
from flying_serving.vllm_adapter.model_runner.configuration import lane_config
from tests.with_vllm.worker.configurations import LLAMA, configuration

NAME = "model.layers.0.mlp.down_proj"


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    """vLLM's, as its own defaults are on CUDA: compiled, with graphs of all steps."""
    config = configuration(tmp_path, LLAMA)
    config.model_config.enforce_eager = False
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 3, 4]
    config.compilation_config.custom_ops = ["none", "+rms_norm"]
    return config


def test_lane_of_a_group_is_eager_beside_a_compiled_lane_1(config: VllmConfig) -> None:
    lane = lane_config(config, 2, 32)
    assert is_compiled(config)
    assert not is_compiled(lane)
    assert config.compilation_config.custom_ops == ["none", "+rms_norm"]
    assert lane.compilation_config.custom_ops == ["all", "+rms_norm"]


@pytest.mark.parametrize(
    ("of_lane1", "of_group"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY),
        (CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_DECODE_ONLY),
        (CUDAGraphMode.NONE, CUDAGraphMode.NONE),
    ],
)
def test_graphs_of_a_group_are_of_decode_steps_alone(
    config: VllmConfig, of_lane1: CUDAGraphMode, of_group: CUDAGraphMode
) -> None:
    config.compilation_config.cudagraph_mode = of_lane1
    assert lane_config(config, 2, 32).compilation_config.cudagraph_mode == of_group
    assert config.compilation_config.cudagraph_mode == of_lane1


def test_configuration_that_is_eager_by_its_flag_is_not_compiled(config: VllmConfig) -> None:
    config.model_config.enforce_eager = True
    assert not is_compiled(config)


class Compiled(nn.Module, TorchCompileWithNoGuardsWrapper):
    """A module that vLLM would compile."""

    def __init__(self, do_not_compile: bool) -> None:
        nn.Module.__init__(self)
        self.do_not_compile = do_not_compile


def test_own_code_of_a_model_runs_for_a_while() -> None:
    inside, never = Compiled(False), Compiled(True)
    model = nn.Sequential(nn.Sequential(inside), never)
    with uncompiled(model):
        assert inside.do_not_compile
        assert never.do_not_compile
    assert not inside.do_not_compile
    assert never.do_not_compile


class Product:
    """The product with a packed unit, which counts its calls."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.calls = 0

    def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x @ self.weight.t()


class Layer(nn.Module):
    """A layer whose product is hidden, with other operations around it."""

    def __init__(self, product: HiddenProduct) -> None:
        super().__init__()
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.apply(self, x * 2) + 1


@contextmanager
def step_of(config: VllmConfig, hidden: HiddenProduct) -> Iterator[None]:
    """A step of the lane with this configuration."""
    config.compilation_config.static_forward_context[NAME] = hidden
    with set_forward_context(None, config, num_tokens=1):
        yield


@pytest.fixture
def traced() -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that torch.compile makes."""
    yield []
    torch.compiler.reset()


def test_compiled_layer_calls_the_product_for_any_number_of_tokens(
    config: VllmConfig, traced: list[torch.fx.GraphModule]
) -> None:
    product = Product(torch.randn(6, 4))
    hidden = HiddenProduct(product, NAME, 6)

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        traced.append(graph)
        return graph

    layer = Layer(hidden)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=keep)
    with step_of(config, hidden):
        for tokens in (5, 2, 9):
            x = torch.randn(tokens, 4)
            torch.testing.assert_close(compiled(x), layer(x))
    assert len(traced) == 1
    assert "flying_serving.product" in traced[0].code
    assert product.calls == 2 * 3


def test_compiled_layer_finds_the_product_of_the_lane_that_runs(
    config: VllmConfig, traced: list[torch.fx.GraphModule]
) -> None:
    first, second = Product(torch.eye(4)), Product(3 * torch.eye(4))
    layer = Layer(HiddenProduct(first, NAME, 4))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.ones(2, 4)
    with step_of(config, layer.product):
        assert compiled(x).tolist() == [[3.0] * 4] * 2
    with step_of(config, HiddenProduct(second, NAME, 4)):
        assert compiled(x).tolist() == [[7.0] * 4] * 2
    assert (first.calls, second.calls) == (1, 1)
