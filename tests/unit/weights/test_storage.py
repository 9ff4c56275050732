"""Storage of linear layers: whatever the ranks of a degree compute is, put together, the full
product.
"""

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.layout.shards import Segment, segments_of
from flying_serving.weights.storage import (
    NARROW,
    PackedColumns,
    PackedRows,
    StridedColumns,
    StridedRows,
    bias_part,
    rows_of,
    sum_in_pairs,
)
from flying_serving.weights.unit_order import keep_by_unit
from flying_serving.weights.units import Product
from harness.examples import examples
from tests.unit.memory.layers import (
    COLUMNS,
    DEGREES,
    ROWS,
    Fused,
    fused_layers,
    numbers,
    plain_pack,
    rows_of_rank,
)


@pytest.mark.parametrize("kind", COLUMNS)
@settings(max_examples=examples(120))
@given(layer=fused_layers())
def test_a_rank_computes_its_columns_of_the_full_product(kind: str, layer: Fused) -> None:
    """Of each segment its own units, in the segments' order, bias included; all ranks together
    compute everything.
    """
    full = layer.full()
    storage = COLUMNS[kind](layer.weight, layer.bias, layer.segments)
    for degree in [degree for degree in DEGREES if degree <= layer.widest]:
        found = torch.full_like(full, float("nan"))
        for rank in range(degree):
            rows = rows_of_rank(layer.segments, rank, degree)
            out = storage.part(rank, degree)(layer.x)
            assert torch.equal(out, full[..., rows]), (rank, degree)
            found[..., rows] = out
        assert torch.equal(found, full)


@pytest.mark.parametrize("kind", COLUMNS)
def test_one_segment_is_the_ranks_outputs_side_by_side(kind: str) -> None:
    """What an all-gather makes of logits."""
    weight, x = numbers(0, 24, 5), numbers(1, 3, 5)
    storage = COLUMNS[kind](weight, None, (Segment(24, 8),))
    for degree in DEGREES:
        parts = [storage.part(rank, degree)(x) for rank in range(degree)]
        assert torch.equal(torch.cat(parts, dim=-1), x @ weight.t())


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("kind", COLUMNS)
def test_a_product_has_the_dimensions_of_its_input(kind: str, degree: int) -> None:
    """A rank of the widest degree has one unit, one of the others several."""
    weight, bias, x = numbers(0, 24, 5), numbers(2, 24), numbers(1, 2, 3, 5)
    storage = COLUMNS[kind](weight, bias, (Segment(24, 8),))
    expected = torch.nn.functional.linear(x, weight, bias).chunk(degree, -1)
    for rank, columns in enumerate(expected):
        assert torch.equal(storage.part(rank, degree)(x), columns)


@pytest.mark.parametrize("kind", ROWS)
@settings(max_examples=examples(80))
@given(
    outputs=st.integers(1, 9),
    unit=st.integers(1, 5),
    widest=st.sampled_from([1, 2, 4, 8]),
    shape=st.sampled_from([(1,), (7,), (2, 3), (0,)]),
    seed=st.integers(0, 99),
)
def test_the_ranks_partial_products_sum_to_the_full_one(
    kind: str, outputs: int, unit: int, widest: int, shape: tuple[int, ...], seed: int
) -> None:
    """Each rank multiplies the columns that its inputs belong to, and the bias counts once."""
    weight, x = numbers(seed, outputs, unit * widest), numbers(seed + 1, *shape, unit * widest)
    bias = numbers(seed + 2, outputs) if seed % 2 else None
    storage = ROWS[kind](weight, bias, Segment(unit * widest, widest))
    for degree in [degree for degree in DEGREES if degree <= widest]:
        width = unit * widest // degree
        parts = [
            storage.part(r, degree)(x[..., r * width : (r + 1) * width].clone())
            for r in range(degree)
        ]
        assert torch.equal(torch.stack(parts).sum(0), torch.nn.functional.linear(x, weight, bias))


@settings(max_examples=examples(60))
@given(
    widest=st.sampled_from([2, 4, 8]),
    unit=st.integers(1, 40),
    tokens=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_packed_sums_have_the_same_bits_at_every_degree(
    widest: int, unit: int, tokens: int, seed: int
) -> None:
    """With real numbers, whose sums depend on their order: ranks that are added in pairs repeat
    what one rank does.
    """
    generator = torch.Generator().manual_seed(seed)
    weight, x = (
        torch.randn(13, unit * widest, generator=generator),
        torch.randn(tokens, unit * widest, generator=generator),
    )
    bias = torch.randn(13, generator=generator)
    storage = PackedRows(weight, bias, Segment(unit * widest, widest), plain_pack)
    one = storage.part(0, 1)(x)
    torch.testing.assert_close(
        one, torch.nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4
    )
    for degree in [degree for degree in DEGREES if 1 < degree <= widest]:
        width = unit * widest // degree
        parts = [storage.part(r, degree)(x[:, r * width : (r + 1) * width]) for r in range(degree)]
        assert torch.equal(sum_in_pairs(parts), one)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("units", [2, 4, 8])
def test_narrow_units_are_rounded_as_often_as_ranks_of_stock(
    units: int, dtype: torch.dtype
) -> None:
    """A rank of stock rounds its product and the sum over the ranks is rounded: so 1.41 times the
    error of one product.

    However many units there are: each rounds less, as its product is smaller. To round at each
    addition gave 2.1.
    """
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(128, 1024, generator=generator).to(dtype)
    x = torch.randn(32, 1024, generator=generator).to(dtype)
    exact = x.double() @ weight.double().t()

    def error(found: torch.Tensor) -> float:
        return float((found.double() - exact).square().mean().sqrt())

    one = error(torch.nn.functional.linear(x, weight))
    storage = PackedRows(weight, None, Segment(1024, units), plain_pack)
    ours = storage.part(0, 1)(x)
    assert ours.dtype == dtype
    assert error(ours) / one <= 1.55


def test_a_part_can_be_used_again_and_leaves_its_input_alone() -> None:
    """Sums are made in place, but never in what a unit keeps or was given."""
    weight, x = numbers(0, 6, 8), numbers(1, 3, 8)
    for make in ROWS.values():
        part = make(weight, None, Segment(8, 4)).part(0, 1)
        before = x.clone()
        first = part(x)
        kept = first.clone()
        assert torch.equal(part(x), kept)
        assert torch.equal(first, kept)
        assert torch.equal(x, before)
    assert torch.equal(weight, numbers(0, 6, 8))


@given(exponent=st.integers(0, 4))
def test_sum_in_pairs(exponent: int) -> None:
    """Neighbours first; a number of parts that is no power of two is refused."""
    count = 2**exponent
    parts = [torch.tensor([1e8 if n % 2 else -1e8, float(n)]) for n in range(count)]
    total = torch.stack(parts).double().sum(0)
    assert torch.equal(sum_in_pairs(parts).double(), total)
    if count > 1:
        with pytest.raises(ValueError, match="zip"):
            sum_in_pairs([torch.zeros(1)] * (count + 1))


def test_rows_of() -> None:
    """A rank's rows of each segment in the fused weight."""
    segments = (Segment(8, 4), Segment(4, 2), Segment(4, 2))
    assert rows_of(segments, 1, 2) == [slice(4, 8), slice(10, 12), slice(14, 16)]
    assert rows_of(segments, 1, 4) == [slice(2, 4), slice(8, 10), slice(12, 14)]


# ---- one copy


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that a product holds on to, through closures, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_of(one)
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            yield from tensors_of(cell.cell_contents)


def lies_in(part: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether every element of a view lies in the memory of a tensor."""
    begin, end = whole.data_ptr(), whole.data_ptr() + whole.numel() * whole.element_size()
    last = sum((size - 1) * stride for size, stride in zip(part.shape, part.stride(), strict=True))
    first = part.data_ptr()
    return begin <= first and first + (last + 1) * part.element_size() <= end


@settings(max_examples=examples(60))
@given(layer=fused_layers())
def test_strided_columns_are_views_of_the_one_weight(layer: Fused) -> None:
    """Each part holds views of it, and at most an index of the order of outputs; a changed weight
    changes all parts.
    """
    kept = layer.weight.clone()
    keep_by_unit(kept, layer.segments)
    storage = StridedColumns(kept, None, layer.segments)
    parts = [(r, d, storage.part(r, d)) for d in DEGREES if d <= layer.widest for r in range(d)]
    for _, _, part in parts:
        held = [tensor for tensor in tensors_of(part) if tensor.is_floating_point()]
        assert held
        for tensor in held:
            assert lies_in(tensor, kept)
    kept.mul_(-2)
    full = torch.nn.functional.linear(layer.x, layer.weight * -2)
    for rank, degree, part in parts:
        assert torch.equal(part(layer.x), full[..., rows_of_rank(layer.segments, rank, degree)])


@given(unit=st.integers(1, 5), widest=st.sampled_from([1, 2, 4, 8]))
def test_strided_rows_are_views_of_the_weight_as_loaded(unit: int, widest: int) -> None:
    """As above, for row-parallel layers."""
    weight, x = numbers(0, 6, unit * widest), numbers(1, 3, unit * widest)
    storage = StridedRows(weight, None, Segment(unit * widest, widest))
    parts = [(r, d, storage.part(r, d)) for d in DEGREES if d <= widest for r in range(d)]
    for _, _, part in parts:
        (held,) = tensors_of(part)
        assert lies_in(held, weight)
    weight.mul_(3)
    for rank, degree, part in parts:
        width = unit * widest // degree
        columns = slice(rank * width, (rank + 1) * width)
        assert torch.equal(part(x[:, columns]), x[:, columns] @ weight[:, columns].t())


@settings(max_examples=examples(40))
@given(layer=fused_layers())
def test_packed_units_hold_each_weight_once(layer: Fused) -> None:
    """Each is packed once at the start, and parts of all degrees are made of those: no bytes for a
    further lane.
    """
    packed: list[torch.Tensor] = []

    def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        packed.append(weight)
        return plain_pack(weight, bias)

    storage = PackedColumns(layer.weight, layer.bias, layer.segments, pack)
    assert sum(weight.numel() for weight in packed) == layer.weight.numel()
    units = len(packed)
    for degree in [degree for degree in DEGREES if degree <= layer.widest]:
        for rank in range(degree):
            storage.part(rank, degree)
    assert len(packed) == units
    rows = torch.cat(packed).tolist()
    assert sorted(rows) == sorted(layer.weight.tolist())


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize(
    "heads", [(8, 8, 8), (8, 2, 2), (8, 1, 1)], ids=["all", "grouped", "one KV head"]
)
@pytest.mark.parametrize("widest", [2, 4, 8])
def test_a_bias_that_the_model_adds_is_cut_as_the_product_is(
    kind: str, heads: tuple[int, ...], widest: int
) -> None:
    """Queries, keys and values each for itself; ranks that share a KV head have the same piece of
    its bias.
    """
    segments = segments_of([4 * count for count in heads], widest, heads)
    size = sum(segment.size for segment in segments)
    bias = torch.arange(size, dtype=torch.float32)
    storage = COLUMNS[kind](torch.zeros(size, 3), bias, segments)
    for degree in (degree for degree in DEGREES if degree <= widest):
        for rank in range(degree):
            product = storage.part(rank, degree)(torch.zeros(1, 3))[0]
            assert torch.equal(bias_part(bias, segments, rank, degree), product)
