"""Which modules let their activation read a fused layer's output unit by unit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul, SwigluOAIAndMul
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)

from flying_serving.weights.gated import ActivationByUnit, read_by_unit
from flying_serving.weights.rule import layers_of
from tests.with_vllm.worker.configurations import LLAMA, configuration
from tests.with_vllm.worker.loaded import alone, nested, random

pytestmark = pytest.mark.usefixtures("classes_imported_here")


@pytest.fixture(autouse=True)
def engine(tmp_path: Path) -> Iterator[None]:
    with alone(configuration(tmp_path, LLAMA)):
        yield


class Mlp(nn.Module):
    """As most models have it."""

    def __init__(self, sizes: tuple[int, ...] = (16, 16), skip_bias_add: bool = False) -> None:
        super().__init__()
        self.gate_up = MergedColumnParallelLinear(
            8, list(sizes), bias=skip_bias_add, skip_bias_add=skip_bias_add
        )
        self.act: nn.Module = SiluAndMul()
        self.down = RowParallelLinear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.gate_up(x)
        x = self.act(x)
        x, _ = self.down(x)
        return x


class Sigmoid(Mlp):
    """A shared expert with a gate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.router = ReplicatedLinear(8, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.down(self.act(self.gate_up(x)[0]))[0]
        return torch.sigmoid(self.router(x)[0]) * out


class Scales(Mlp):
    """Falcon H1 multiplies the gate in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.gate_up(x)
        x[:, :16] *= 2.0
        return self.down(self.act(x))[0]


class Twice(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.gate_up(x)
        return self.act(x) + x.sum()


class Returns(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.gate_up(x)
        self.act(x)
        return x


class Elsewhere(Mlp):
    """Gives the output to another layer as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, _ = self.gate_up(x)
        self.down(x)
        return self.act(x)


class Unread(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.gate_up(x)
        return self.act(x)


def names(model: nn.Module) -> list[str]:
    return [layer.name for layer in layers_of(model) if read_by_unit(layer, 2)]


@pytest.mark.parametrize("module", [Mlp, Sigmoid])
def test_output_that_only_the_activation_reads_is_found(module: type[Mlp]) -> None:
    assert names(nested(mlp=module())) == ["mlp.gate_up"]


@pytest.mark.parametrize("module", [Scales, Twice, Returns, Elsewhere, Unread])
def test_output_that_another_operation_reads_is_left_in_order(module: type[Mlp]) -> None:
    assert names(nested(mlp=module())) == []


def test_activation_that_pairs_other_columns_is_left_alone() -> None:
    mlp = Mlp()
    mlp.act = SwigluOAIAndMul()
    assert names(nested(mlp=mlp)) == []


@pytest.mark.parametrize("sizes", [(16, 8), (16, 16, 16)])
def test_layer_that_is_no_pair_is_left_in_order(sizes: tuple[int, ...]) -> None:
    assert names(nested(mlp=Mlp(sizes))) == []


def test_layer_whose_bias_the_model_adds_is_left_in_order() -> None:
    assert names(nested(mlp=Mlp(skip_bias_add=True))) == []


def test_layer_of_two_modules_is_left_in_order() -> None:
    """One of them may read it otherwise."""
    first, second = Mlp(), Scales()
    second.gate_up = first.gate_up
    assert names(nested(first=first, second=second)) == []


def test_trial_leaves_the_module_as_it_was() -> None:
    mlp = Scales()
    before = dict(mlp._modules)
    assert names(nested(mlp=mlp)) == []
    assert dict(mlp._modules) == before


def test_modules_that_share_an_activation_have_units_of_their_own() -> None:
    first, second = Mlp(), Mlp()
    second.act = first.act
    layers = {layer.name: layer for layer in layers_of(nested(a=first, b=second))}
    for name, units in (("a.gate_up", 2), ("b.gate_up", 4)):
        assert read_by_unit(layers[name], units)
    assert isinstance(first.act, ActivationByUnit)
    assert isinstance(second.act, ActivationByUnit)
    assert (first.act.units, second.act.units) == (2, 4)
    assert first.act.activation is second.act.activation


@pytest.mark.parametrize("shape", [(3, 24), (2, 5, 24), (0, 24)])
@pytest.mark.parametrize("units", [1, 2, 4])
@pytest.mark.parametrize("activation", [SiluAndMul, GeluAndMul])
def test_activation_by_unit_is_that_of_gates_and_ups_apart(
    shape: tuple[int, ...], units: int, activation: type[nn.Module]
) -> None:
    x, plain = random(*shape), activation()
    by_unit = x.view(*shape[:-1], units, 2, 12 // units)
    gate, up = (by_unit[..., part, :].reshape(*shape[:-1], 12) for part in (0, 1))
    expected = plain(torch.cat([gate, up], dim=-1))
    assert torch.equal(ActivationByUnit(plain, units)(x), expected)
