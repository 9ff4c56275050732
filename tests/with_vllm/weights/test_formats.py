"""What of a quantized layer's tensors belongs to a unit, and which units there cannot be."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flying_lab.tiny_models.quantized import GROUP, int4_zero_points, pack_int4
from flying_serving.errors import WeightError
from flying_serving.weights import expert_forms
from flying_serving.weights.formats import FORMATS, METHODS, Axes, part_of
from zoo.page import QUANTIZATION

UNITS = st.sampled_from([1, 2, 4, 8])
INT4 = FORMATS["CPUWNA16LinearKernel"]
BLOCK = 16
"""Outputs whose weights the int4 kernel has in one row."""
EIGHT = torch.arange(0, 32, 4)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The eight numbers of each int32, side by side."""
    return ((packed.unsqueeze(-1) >> EIGHT) & 15).flatten(-2)


def as_the_kernel_has_it(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantize a weight (out, in): blocks of 16 outputs, all inputs of a block in one row."""
    numbers, scales, zeros = int4_zero_points(weight)
    blocks = pack_int4(numbers.t().contiguous(), 1)
    blocks = blocks.unflatten(1, (-1, BLOCK // 8)).transpose(0, 1).flatten(1)
    return {
        "qweight": blocks.contiguous(),
        "scales": scales.t().contiguous(),
        "qzeros": pack_int4(zeros.t().contiguous(), 1),
    }


def dequantized(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight (out, in) that the kernel's tensors stand for."""
    blocks = tensors["qweight"]
    numbers = nibbles(blocks.unflatten(1, (-1, BLOCK // 8)))  # (blocks, in, 16)
    by_output = numbers.transpose(1, 2).flatten(0, 1)
    zeros, scales = nibbles(tensors["qzeros"]).t(), tensors["scales"].t()
    spread = [one.repeat_interleave(GROUP, dim=1) for one in (zeros, scales)]
    return (by_output - spread[0]) * spread[1]


def weight_of(outputs: int, inputs: int, seed: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


@given(units=UNITS, per_unit=st.integers(1, 3), inputs=st.integers(1, 3), seed=st.integers(0, 99))
def test_dequantized_unit_of_outputs_is_that_part_of_the_layer(
    units: int, per_unit: int, inputs: int, seed: int
) -> None:
    sizes = (INT4.outputs * per_unit * units, GROUP * inputs)
    tensors = as_the_kernel_has_it(weight_of(*sizes, seed))
    whole = dequantized(tensors)
    for unit in range(units):
        rows = slice(*(sizes[0] // units * edge for edge in (unit, unit + 1)))
        part = {k: part_of(t, INT4.tensors[k], sizes, outputs=rows) for k, t in tensors.items()}
        assert torch.equal(dequantized(part), whole[rows])


@given(units=UNITS, per_unit=st.integers(1, 3), outputs=st.integers(1, 3), seed=st.integers(0, 99))
def test_dequantized_unit_of_inputs_is_that_part_of_the_layer(
    units: int, per_unit: int, outputs: int, seed: int
) -> None:
    sizes = (INT4.outputs * outputs, GROUP * per_unit * units)
    tensors = as_the_kernel_has_it(weight_of(*sizes, seed))
    whole = dequantized(tensors)
    for unit in range(units):
        columns = slice(*(sizes[1] // units * edge for edge in (unit, unit + 1)))
        part = {k: part_of(t, INT4.tensors[k], sizes, inputs=columns) for k, t in tensors.items()}
        assert torch.equal(dequantized(part), whole[:, columns])


@given(
    units=UNITS,
    axes=st.sampled_from([Axes(0, 1), Axes(1, 0), Axes(0), Axes(None, 1)]),
    along=st.sampled_from(["outputs", "inputs"]),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_units_side_by_side_are_the_tensor(
    units: int, axes: Axes, along: str, shape: tuple[int, int]
) -> None:
    """A tensor that is not cut along the dimension is whole in each."""
    tensor = torch.arange(shape[0] * shape[1] * units * units).view(shape[0] * units, -1)
    sizes = (tensor.shape[0] * 2, tensor.shape[1] * 2) if axes.outputs == 0 else (64, 64)
    if axes.outputs != 0:
        sizes = (tensor.shape[1] * 2, tensor.shape[0] * 2)
        if axes.outputs is None:
            sizes = sizes[::-1]
    dim = getattr(axes, along)
    size = sizes[along == "inputs"]
    parts = [
        part_of(tensor, axes, sizes, **{along: slice(size // units * u, size // units * (u + 1))})
        for u in range(units)
    ]
    if dim is None or tensor.shape[dim] == 1:
        assert all(torch.equal(part, tensor) for part in parts)
    else:
        assert torch.equal(torch.cat(parts, dim), tensor)


def test_a_part_of_what_has_one_number_is_refused() -> None:
    with pytest.raises(WeightError, match="3 numbers for 96 cannot be cut at 0 and 48"):
        part_of(torch.zeros(3, 2), Axes(None, 0), (2, 96), inputs=slice(0, 48))


def test_the_table_of_models_names_every_method_that_is_not_refused() -> None:
    methods = (*METHODS, *expert_forms.METHODS)
    assert not [name for name in methods if f"`{name}`" not in QUANTIZATION]


FP8_BLOCKS = FORMATS["CutlassFp8BlockScaledMMKernel"]


@given(units=UNITS, blocks=st.tuples(st.integers(1, 2), st.integers(1, 2)))
def test_unit_of_blocks_has_the_scales_of_its_numbers(units: int, blocks: tuple[int, int]) -> None:
    """Of outputs, and of inputs: numbers and scales of the same blocks."""
    sizes = (BLOCK * blocks[0] * units, BLOCK * blocks[1] * units)
    marks = torch.arange(sizes[0] * sizes[1] // BLOCK**2).view(blocks[0] * units, -1)
    weight = marks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    tensors = {"weight": weight, "weight_scale_inv": marks}
    for unit in range(units):
        for along, size in zip(("outputs", "inputs"), sizes, strict=True):
            rows = slice(size // units * unit, size // units * (unit + 1))
            part = {
                key: part_of(tensor, FP8_BLOCKS.tensors[key], sizes, **{along: rows})
                for key, tensor in tensors.items()
            }
            assert torch.equal(part["weight"][::BLOCK, ::BLOCK], part["weight_scale_inv"])


def test_one_number_for_all_outputs_is_whole_in_each_part() -> None:
    """It may be a tensor without dimensions."""
    for scale in (torch.tensor(2.0), torch.ones(1), torch.ones(1, 1)):
        assert part_of(scale, Axes(0), (64, 64), outputs=slice(0, 16)) is scale
