"""Linear layers as Hypothesis draws them, and every storage of their weights."""

import functools
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from flying_serving.layout.shards import Segment, segments_of
from flying_serving.memory.arena import pages_touched
from flying_serving.memory.cuda_arena import CudaArena
from flying_serving.weights.lending.device_pages import DevicePages
from flying_serving.weights.lending.weight_file import WeightFile
from flying_serving.weights.storage import (
    Matmul,
    PackedColumns,
    PackedRows,
    SharedLinear,
    StridedColumns,
    StridedRows,
    rows_of,
)
from flying_serving.weights.unit_order import UnitOrder, keep_by_unit
from flying_serving.weights.units import Product, RawUnits
from tests.unit.memory.fake_cuda import PAGE, fake_device

DEGREES = (1, 2, 4, 8)


def plain_pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """Pack nothing: the product as torch has it, with a copy, so that parts of the original are not
    used unseen.
    """
    weight = weight.clone()

    def multiply(x: torch.Tensor, out: torch.Tensor) -> None:
        assert out.is_contiguous()
        assert x.stride(-1) == 1 or x.shape[-1] == 1
        out.copy_(torch.nn.functional.linear(x, weight, bias))

    return multiply


@functools.cache
def weight_file() -> WeightFile:
    """Where storages keep what may be dropped."""
    return WeightFile(tempfile.gettempdir(), tempfile.gettempdir(), 0, writes=True)


class Table:
    """What reads a weight as it is, as an embedding does."""

    def __init__(self, weight: torch.Tensor, segments: tuple[Segment, ...]) -> None:
        self.weight, self.segments = weight, segments
        self.units = RawUnits.of_rows(weight, segments, weight_file())

    def part(self, rank: int, degree: int) -> Matmul:
        """The products with the rank's rows of each segment."""
        check, rows = self.units.guard(rank, degree), rows_of(self.segments, rank, degree)

        def product(x: torch.Tensor) -> torch.Tensor:
            check()
            return torch.cat(
                [torch.nn.functional.linear(x, self.weight[place]) for place in rows], dim=-1
            )

        return product


def by_unit(
    weight: torch.Tensor, bias: torch.Tensor | None, segments: tuple[Segment, ...]
) -> StridedColumns:
    """Store a copy of a weight unit by unit."""
    kept = weight.clone()
    keep_by_unit(kept, segments)
    return StridedColumns(kept, bias, segments)


class SinglePages(CudaArena):
    """An arena whose extents are single pages, so that the units of any rank can be dropped."""

    def back(self, first_byte: int, size_bytes: int) -> None:
        """Back each page by itself."""
        for page in pages_touched(first_byte, size_bytes, PAGE):
            super().back(page * PAGE, 1)


def device_pages(size_bytes: int, file: WeightFile | None = None) -> tuple[CudaArena, DevicePages]:
    """Return an arena of a device, and the pages of weights in it."""
    arena = SinglePages(fake_device(), size_bytes)
    return arena, DevicePages(arena, file or weight_file(), torch.empty(3000, dtype=torch.int8))


def device_columns(
    weight: torch.Tensor, bias: torch.Tensor | None, segments: tuple[Segment, ...]
) -> StridedColumns:
    """Store a weight unit by unit in an arena of a device."""
    arena, pages = device_pages(weight.nbytes)
    placed = pages.place(weight, [])
    keep_by_unit(placed, segments)
    rows = UnitOrder(segments).rows_of_units()
    units = RawUnits.of_rows(placed, segments, pages, rows)
    columns = StridedColumns(placed, bias, segments, units)
    weakref.finalize(columns, arena.close)
    return columns


def device_rows(
    weight: torch.Tensor, bias: torch.Tensor | None, segments: tuple[Segment, ...]
) -> StridedRows:
    """Store the transpose of a weight in an arena of a device."""
    arena, pages = device_pages(weight.nbytes)
    placed = pages.place(weight.t(), [])
    rows = StridedRows(placed.t(), bias, segments[0], RawUnits.of_rows(placed, segments, pages))
    weakref.finalize(rows, arena.close)
    return rows


MakeColumns = Callable[[torch.Tensor, torch.Tensor | None, tuple[Segment, ...]], SharedLinear]
COLUMNS: dict[str, MakeColumns] = {
    "packed": lambda weight, bias, segments: PackedColumns(weight, bias, segments, plain_pack),
    "strided": by_unit,
}
MakeRows = Callable[[torch.Tensor, torch.Tensor | None, Segment], SharedLinear]
ROWS: dict[str, MakeRows] = {
    "packed": lambda weight, bias, segment: PackedRows(weight, bias, segment, plain_pack),
    "strided": StridedRows,
}
Lending = PackedColumns | PackedRows | StridedColumns | StridedRows | Table
LENDING: dict[str, Callable[[torch.Tensor, torch.Tensor | None, tuple[Segment, ...]], Lending]] = {
    "packed columns": lambda weight, bias, cut: PackedColumns(
        weight, bias, cut, plain_pack, weight_file()
    ),
    "packed rows": lambda weight, bias, cut: PackedRows(
        weight, bias, cut[0], plain_pack, weight_file()
    ),
    "device columns": device_columns,
    "device rows": device_rows,
    "table": lambda weight, bias, cut: Table(weight, cut),
}
"""What can be dropped. Rows have one segment."""


@dataclass
class Fused:
    """A fused column-parallel layer, whole numbers for weights so that sums are exact in any
    order.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    segments: tuple[Segment, ...]
    x: torch.Tensor
    widest: int

    def full(self) -> torch.Tensor:
        """Return the product with the whole weight."""
        return torch.nn.functional.linear(self.x, self.weight, self.bias)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Return whole numbers, as floats."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


@st.composite
def fused_layers(draw: st.DrawFn) -> Fused:
    """Draw a layer of one to four segments, cut anywhere or between heads, of which some may be
    fewer than ranks.
    """
    widest = draw(st.sampled_from([2, 4, 8]))
    heads = draw(st.none() | st.lists(st.sampled_from([1, 2, 4, 8, 16]), min_size=1, max_size=4))
    if heads is None:
        sizes = [widest * n for n in draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))]
    else:
        sizes = [count * draw(st.integers(1, 5)) for count in heads]
    inputs, seed = draw(st.integers(1, 9)), draw(st.integers(0, 99))
    shape = draw(st.sampled_from([(1,), (7,), (2, 3), (0,)]))
    bias = numbers(seed + 1, sum(sizes)) if draw(st.booleans()) else None
    return Fused(
        numbers(seed, sum(sizes), inputs),
        bias,
        segments_of(sizes, widest, heads),
        numbers(seed + 2, *shape, inputs),
        widest,
    )


def rows_of_rank(segments: tuple[Segment, ...], rank: int, degree: int) -> list[int]:
    """Return the rows of the fused weight that a rank works on, segment by segment."""
    rows, start = [], 0
    for segment in segments:
        for unit in segment.units_of(rank, degree):
            first = start + unit * segment.unit_size
            rows += range(first, first + segment.unit_size)
        start += segment.size
    return rows
