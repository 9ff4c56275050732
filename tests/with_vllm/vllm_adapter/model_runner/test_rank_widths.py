"""Activations that depend on the columns of a rank: a whole model works as its ranks would."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import GeluAndMul, GeluAndMulSparse

from flying_serving.vllm_adapter.model_runner.rank_widths import (
    activations_by_width,
    degrees_differ,
    widths_of_ranks,
)

TOKENS, WIDTH = 3, 64


@pytest.fixture
def model() -> nn.Module:
    with set_current_vllm_config(VllmConfig()):
        sparse = GeluAndMulSparse(activation_sparsity=0.95, approximate="tanh")
        return nn.ModuleDict({"sparse": sparse, "plain": GeluAndMul(approximate="tanh")})


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(TOKENS, 2 * WIDTH, generator=torch.Generator().manual_seed(0))


def of_ranks(activation: nn.Module, x: torch.Tensor, ranks: int) -> torch.Tensor:
    """What the ranks of a group compute, each of its own columns, side by side."""
    gates, ups = (half.chunk(ranks, dim=-1) for half in x.chunk(2, dim=-1))
    parts = [torch.cat(pair, dim=-1) for pair in zip(gates, ups, strict=True)]
    return torch.cat([activation(part) for part in parts], dim=-1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_whole_activation_computes_what_its_ranks_compute(
    model: nn.ModuleDict, x: torch.Tensor, ranks: int
) -> None:
    expected = of_ranks(model["sparse"], x, ranks)
    with widths_of_ranks(model, ranks):
        found = model["sparse"](x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_ranks_compute_other_values_than_one_device(model: nn.ModuleDict, x: torch.Tensor) -> None:
    assert not torch.allclose(of_ranks(model["sparse"], x, 2), model["sparse"](x))


def test_activations_work_on_all_columns_afterwards(model: nn.ModuleDict, x: torch.Tensor) -> None:
    before = model["sparse"](x)
    with widths_of_ranks(model, 2):
        pass
    assert torch.equal(model["sparse"](x), before)


def test_only_activations_by_width_are_found(model: nn.ModuleDict) -> None:
    assert activations_by_width(model) == [model["sparse"]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"activation_sparsity_pattern": None}, False),
        ({"activation_sparsity_pattern": [0.0, 0.0]}, False),
        ({"activation_sparsity_pattern": [0.95, 0.0]}, True),
    ],
)
def test_degrees_differ_where_a_layer_is_sparse(fields: dict[str, object], expected: bool) -> None:
    config = SimpleNamespace(hf_text_config=SimpleNamespace(**fields))
    assert degrees_differ(config) is expected
