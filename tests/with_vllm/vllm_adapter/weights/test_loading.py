"""Random weights for a check: everything that a checkpoint would have matters, and nothing else is
touched.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flying_serving.vllm_adapter.weights.loading import (
    RandomWeights,
    create_without_data,
    parameters_on_meta,
    saved_buffers,
)
from harness.experts_cpu.kernel import register, scaled
from harness.mxfp4_cpu.kernel import numbers_of
from tests.with_vllm.weights.expert_cases import CASES, with_kernel
from tests.with_vllm.weights.expert_ranks import routed
from tests.with_vllm.worker.loaded import load, random, tree


class Gate(nn.Module):
    """A router with a bias that a checkpoint has, and a scale and a table that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 8))
        self.register_buffer("correction_bias", torch.zeros(4))
        self.register_buffer("counts", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("_k_scale", torch.tensor(1.0))
        self.register_buffer("table", torch.zeros(4), persistent=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.other = Gate(), Gate()


def drawn() -> Model:
    model = Model()
    RandomWeights.load_weights(SimpleNamespace(), model, None)  # type: ignore[arg-type]
    return model


def test_buffers_of_checkpoints_are_drawn_by_name() -> None:
    model, again = drawn(), drawn()
    assert model.gate.correction_bias.unique().numel() == 4
    assert torch.equal(model.gate.correction_bias, again.gate.correction_bias)
    assert not torch.equal(model.gate.correction_bias, model.other.correction_bias)
    assert torch.equal(model.gate.weight, again.gate.weight)
    assert model.gate.weight.abs().min() > 0


def test_outputs_of_weights_in_mxfp4_are_as_large_as_their_inputs() -> None:
    model = nn.Module()
    for name, width in (("w2_weight", 512), ("w2_weight_scale", 32)):
        data = torch.zeros(2, 256, width, dtype=torch.uint8)
        model.register_parameter(name, nn.Parameter(data, requires_grad=False))
    RandomWeights.load_weights(SimpleNamespace(), model, None)  # type: ignore[arg-type]
    numbers = numbers_of(model.w2_weight, model.w2_weight_scale)
    outputs = numbers @ torch.randn(1024, generator=torch.Generator().manual_seed(0))
    assert model.w2_weight_scale.unique().numel() == 3
    assert 0.6 < outputs.std() < 1.6


@pytest.mark.usefixtures("classes_imported_here")
@pytest.mark.parametrize("kind", ["tensor-static", "channel", "block-of-128"])
def test_outputs_of_experts_in_fp8_are_as_large_as_their_inputs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch.setattr)
    with with_kernel(tmp_path, CASES[f"fp8-{kind}"]) as config:
        model = tree(config, 1)
        load(model)
        RandomWeights.load_weights(SimpleNamespace(), model, None)  # type: ignore[arg-type]
        layer = routed(model)
        tensors = dict(layer.named_parameters(recurse=False))
        for weight in ("w13_weight", "w2_weight"):
            scales = tensors.get(f"{weight}_scale", tensors.get(f"{weight}_scale_inv"))
            assert scales is not None
            few = scales[0].view(-1)[0] if kind.startswith("tensor") else scales[0]
            numbers = scaled(tensors[weight][0], few)
            outputs = numbers @ random(numbers.shape[1], 16).double()
            assert 0.5 < outputs.std() < 2


def test_computed_and_counting_tensors_are_not_drawn() -> None:
    gate = drawn().gate
    assert gate._k_scale == 1.0
    assert not gate.table.any()
    assert not gate.counts.any()


def test_saved_buffers_are_named_as_in_the_model() -> None:
    assert [name for name, _ in saved_buffers(Gate(), "gate")] == [
        "gate.correction_bias",
        "gate.counts",
        "gate._k_scale",
    ]
    assert next(saved_buffers(Gate()))[0] == "correction_bias"


def test_a_parameter_on_the_meta_device_is_the_object_that_it_was() -> None:
    parameter, module = nn.Parameter(torch.zeros(3)), nn.Module()
    parameter.output_dim = 0  # type: ignore[attr-defined]
    with parameters_on_meta():
        module.weight = parameter
    assert module.weight is parameter
    assert parameter.is_meta
    assert not parameter.requires_grad
    assert parameter.output_dim == 0  # type: ignore[attr-defined]


def test_units_of_a_large_weight_are_drawn_and_differ() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2048, 1024))
    RandomWeights.load_weights(SimpleNamespace(), model, None)  # type: ignore[arg-type]
    units = model.weight.detach().chunk(4)
    assert all(unit.unique().numel() > 100_000 for unit in units)
    assert not any(torch.equal(units[0], unit) for unit in units[1:])
    assert model.weight.abs().max() <= 3**0.5 / 32


def creating(self: None, layer: nn.Module, rows: int, *, columns: int) -> None:
    weight = nn.Parameter(torch.zeros(rows, columns))
    weight.is_meta_at_first = weight.is_meta  # type: ignore[attr-defined]
    layer.register_parameter("weight", weight)


def test_modules_without_weights_are_not_filled() -> None:
    layer = nn.Module()
    with parameters_on_meta():
        create_without_data(creating, None, layer, 3, columns=2)
    assert layer.weight.is_meta_at_first
    assert layer.weight.shape == (3, 2)


def test_modules_with_weights_are_filled() -> None:
    layer = nn.Module()
    create_without_data(creating, None, layer, 3, columns=2)
    assert torch.equal(layer.weight, torch.zeros(3, 2))
