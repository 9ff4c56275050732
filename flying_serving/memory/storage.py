"""Storage of the bytes of one linear layer, so that a lane of any degree can multiply with its part
of them.

Two ways behind one interface. `Strided` keeps the weight as one matrix and hands out views (GPUs).
Rows lie unit by unit, so a lane's part of them is one slice. Columns lie as they were loaded: a
leading dimension costs nothing. `Packed` keeps each unit in the library's blocked format (CPUs).
There oneDNN is up to twice as fast on packed weights at small batches, and a packed matrix cannot
be cut afterwards. Either way there is one copy.

Packed weights have `units`: a lane can do without some while its weights are lent
(`memory/units.py`). Strided weights have them if they lie in an arena.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

import torch

from flying_serving.layout.shards import Segment
from flying_serving.memory.unit_order import RankRows, UnitOrder
from flying_serving.memory.units import Pack, PackedUnit, PackedUnits, RawUnits
from flying_serving.memory.weight_file import WeightFile

Matmul = Callable[[torch.Tensor], torch.Tensor]
"""(tokens, in) -> (tokens, out). Raises IntegrityError while a packed unit of it is dropped."""

NARROW = (torch.bfloat16, torch.float16)


class SharedLinear(Protocol):
    """The storage of one layer's weight, for all lanes."""

    def part(self, rank: int, degree: int) -> Matmul:
        """Return the product with the part that `rank` of `degree` works on."""


def rows_of(segments: Sequence[Segment], rank: int, degree: int) -> list[slice]:
    """Return the rows of the fused weight that `rank` of `degree` works on, of each segment."""
    rows, start = [], 0
    for segment in segments:
        units = segment.units_of(rank, degree)
        rows.append(
            slice(start + units.start * segment.unit_size, start + units.stop * segment.unit_size)
        )
        start += segment.size
    return rows


class PackedColumns:
    """Column-parallel: outputs are cut. Segments with equally many units are packed together, unit
    by unit.

    `file`: keeps units that may be dropped; None: no unit may be dropped.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        segments: Sequence[Segment],
        pack: Pack,
        file: WeightFile | None = None,
    ) -> None:
        self._families: list[tuple[list[Segment], list[PackedUnit]]] = []
        first = 0
        for count, run in groupby(segments, key=lambda s: s.units):
            family = list(run)
            packed = []
            for unit in range(count):
                rows = rows_of(segments, unit, count)[first : first + len(family)]
                unit_bias = None if bias is None else torch.cat([bias[r] for r in rows])
                packed.append(
                    PackedUnit(torch.cat([weight[r] for r in rows]), unit_bias, pack, file)
                )
            self._families.append((family, packed))
            first += len(family)
        self.units = PackedUnits([(family[0], packed) for family, packed in self._families])

    def part(self, rank: int, degree: int) -> Matmul:
        parts = [_family_part(family, packed, rank, degree) for family, packed in self._families]
        if len(parts) == 1:
            return parts[0]
        return lambda x: torch.cat([part(x) for part in parts], dim=-1)


def _family_part(
    segments: list[Segment], packed: list[PackedUnit], rank: int, degree: int
) -> Matmul:
    """Return the product with consecutive segments of the same number of units; a packed matrix
    holds one unit of each.
    """
    chosen = [packed[u] for u in segments[0].units_of(rank, degree)]
    sizes = [segment.unit_size for segment in segments]
    if len(chosen) == 1:
        return _alone(chosen[0], sum(sizes))
    # segments that are copied at once
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    count, width = len(chosen), sum(sizes)

    def columns(x: torch.Tensor) -> torch.Tensor:
        flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        by_unit = flat.new_empty(count, flat.shape[0], width)
        for unit, out in zip(chosen, by_unit.unbind(), strict=True):
            unit.multiply(flat, out)
        ordered = _by_segment(by_unit, runs)
        return ordered if x.dim() == 2 else ordered.view(*x.shape[:-1], count * width)

    return columns


def _alone(unit: PackedUnit, width: int) -> Matmul:
    """Return the product with one unit, whose outputs are in order and need no sum."""

    def product(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2:
            out = x.new_empty(x.shape[0], width)
            unit.multiply(x, out)
            return out
        out = x.new_empty(*x.shape[:-1], width)
        unit.multiply(x.reshape(-1, x.shape[-1]), out.view(-1, width))
        return out

    return product


def _by_segment(by_unit: torch.Tensor, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Reorder products by segment, in one copy.

    Takes (units, tokens, segments of a unit), returns (tokens, units of a segment, one segment
    after the other). `runs`: (size, number) of consecutive segments that are equally large in a
    unit.
    """
    units, tokens, width = by_unit.shape
    if len(runs) == 1:
        size, number = runs[0]
        return (
            by_unit.view(units, tokens, number, size)
            .permute(1, 2, 0, 3)
            .reshape(tokens, units * width)
        )
    out = by_unit.new_empty(tokens, units * width)
    sources = by_unit.split_with_sizes([size * number for size, number in runs], 2)
    targets = out.split_with_sizes([size * number * units for size, number in runs], 1)
    for (size, number), source, target in zip(runs, sources, targets, strict=True):
        by_segment = source.view(units, tokens, number, size).permute(1, 2, 0, 3)
        target.view(tokens, number, units, size).copy_(by_segment)
    return out


class PackedRows:
    """Row-parallel: inputs are cut, and the partial products of a lane's units are added
    (`sum_of_units`).

    The bias is part of the first unit's product, so of the first rank's, as in vLLM. `file`: as in
    `PackedColumns`.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        segment: Segment,
        pack: Pack,
        file: WeightFile | None = None,
    ) -> None:
        self._segment = segment
        self._width = weight.shape[0]
        parts = [columns.contiguous() for columns in weight.split(segment.unit_size, dim=1)]
        self._packed = [
            PackedUnit(part, None if unit else bias, pack, file) for unit, part in enumerate(parts)
        ]
        self.units = PackedUnits([(segment, self._packed)])

    def part(self, rank: int, degree: int) -> Matmul:
        chosen = [self._packed[u] for u in self._segment.units_of(rank, degree)]
        count, width = len(chosen), self._width
        if count == 1:
            return _alone(chosen[0], width)

        def rows(x: torch.Tensor) -> torch.Tensor:
            flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
            products = flat.new_empty(count, flat.shape[0], width).unbind()
            # units are equally wide; `chunk` is one call of C++, where `split` is Python's first
            for unit, part, out in zip(chosen, flat.chunk(count, 1), products, strict=True):
                unit.multiply(part, out)
            total = sum_of_units(list(products))
            return total if x.dim() == 2 else total.view(*x.shape[:-1], width)

        return rows


def sum_of_units(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the partial products of a lane's units; may overwrite them.

    Narrow floats are summed in float32 and rounded once, as between the ranks
    (`ShmGroup.all_reduce`). Rounded at each addition, eight units have 2.1 times the error of one
    product over all of them in place of 1.4 times.
    """
    dtype = parts[0].dtype
    if dtype not in NARROW or len(parts) <= 2:  # the sum of two is rounded once anyway
        return sum_in_pairs(parts)
    total = parts[0].float()
    for part in parts[1:]:
        total.add_(part)
    return total.to(dtype)


def sum_in_pairs(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of a power of two of tensors, neighbours first, in place.

    A group of two sums over its ranks in the same order, so degrees 1 and 2 of two engines agree
    bit for bit.
    """
    while len(parts) > 1:
        parts = [left.add_(right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def bias_part(
    bias: torch.Tensor, segments: Sequence[Segment], rank: int, degree: int
) -> torch.Tensor:
    """Return the part of a fused bias for `rank` of `degree`: a view, or a copy for several
    segments.
    """
    pieces = [bias[rows] for rows in rows_of(segments, rank, degree)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


class StridedColumns:
    """Column-parallel over one matrix, whose rows lie unit by unit: `keep_by_unit`.

    A rank's part is one product with a slice of rows, or two where ranks share KV heads. One copy
    puts the outputs in the order of the segments. A rank with one unit of each segment needs none.

    `bias`: in the order of the segments, as it was loaded. `units`: of the weight, that may be
    dropped; None: no unit may.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        segments: Sequence[Segment],
        units: RawUnits | None = None,
    ) -> None:
        self._order = UnitOrder(segments)
        self._weight = weight
        self.units = units
        self._bias = None if bias is None else _by_unit(bias, self._order)
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}

    def part(self, rank: int, degree: int) -> Matmul:
        return guarded(self._part(rank, degree), self.units, rank, degree)

    def _part(self, rank: int, degree: int) -> Matmul:
        part = self._order.rows_of(rank, degree)
        products = [self._product(run) for run in part.runs]
        if part.is_in_order:
            return products[0]
        if len(products) == 1:
            return self._in_order(products[0], part)
        return lambda x: _side_by_side([product(x) for product in products], part.pieces)

    def part_by_unit(self, rank: int, degree: int) -> Matmul:
        """Return the product of `part` without the copy: all segments of a unit, then those of the
        next one. Raises ValueError if it is not one product.
        """
        (rows,) = self._order.rows_of(rank, degree).runs
        return guarded(self._product(rows), self.units, rank, degree)

    def _product(self, rows: slice) -> Matmul:
        weight = self._weight[rows]
        bias = None if self._bias is None else self._bias[rows]
        return lambda x: torch.nn.functional.linear(x, weight, bias)

    def _in_order(self, product: Matmul, part: RankRows) -> Matmul:
        """Return a product whose outputs are put in the order of the segments, block by block."""
        size, blocks = part.blocks()
        if blocks not in self._indices:  # the ranks of a degree have the same one
            self._indices[blocks] = torch.tensor(blocks, device=self._weight.device)
        index = self._indices[blocks]

        def columns(x: torch.Tensor) -> torch.Tensor:
            out = product(x)
            by_block = out.view(*out.shape[:-1], len(blocks), size)
            return by_block.index_select(-2, index).view(out.shape)

        return columns


def _by_unit(bias: torch.Tensor, order: UnitOrder) -> torch.Tensor:
    """Return a loaded bias in the order of the weight's rows: a copy unless it is in that order."""
    rows = order.loaded_rows()
    return bias if len(rows) == 1 else torch.cat([bias[part] for part in rows])


def _side_by_side(
    outputs: Sequence[torch.Tensor], pieces: Sequence[tuple[int, slice]]
) -> torch.Tensor:
    """Return columns of products side by side, in one copy."""
    return torch.cat([outputs[run][..., columns] for run, columns in pieces], dim=-1)


class StridedRows:
    """Row-parallel over the weight as it was loaded: a column slice. GEMM libraries take a leading
    dimension.

    `units`: rows of the transpose, which is contiguous then, that may be dropped; None: none may.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        segment: Segment,
        units: RawUnits | None = None,
    ) -> None:
        self.units = units
        self._weight = weight
        self._bias = bias
        self._segment = segment

    def part(self, rank: int, degree: int) -> Matmul:
        (columns,) = rows_of([self._segment], rank, degree)
        weight = self._weight[:, columns]
        bias = None if rank else self._bias
        return guarded(
            lambda x: torch.nn.functional.linear(x, weight, bias), self.units, rank, degree
        )


def guarded(product: Matmul, units: RawUnits | None, rank: int, degree: int) -> Matmul:
    """Return a product that raises IntegrityError while a unit that the rank works on is
    dropped.
    """
    if units is None:
        return product
    check = units.guard(rank, degree)

    def checked(x: torch.Tensor) -> torch.Tensor:
        check()
        return product(x)

    return checked
