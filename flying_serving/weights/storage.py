"""Storage of the bytes of one linear layer, so that a lane of any degree can multiply with its part
of them.

Two ways behind one interface. `Strided` keeps the weight as one matrix and hands out views (GPUs).
Rows lie unit by unit, so a lane's part of them is one slice. Columns lie as they were loaded: a
leading dimension costs nothing. `Packed` keeps each unit in the library's blocked format (CPUs).
There oneDNN is up to twice as fast on packed weights at small batches, and a packed matrix cannot
be cut afterwards. Either way there is one copy.

Packed weights have `units` (`units.py`): a lane can do without some while its weights are lent.
Strided weights have them if they lie in an arena. `UnitColumns` and `UnitRows` are the
products with units of any kind.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

import torch

from flying_serving.layout.shards import Segment
from flying_serving.weights.unit_order import RankRows, UnitOrder
from flying_serving.weights.units import Pack, PackedUnit, PackedUnits, RawUnits, WeightPages

Matmul = Callable[[torch.Tensor], torch.Tensor]
"""(tokens, in) -> (tokens, out). Raises IntegrityError while a packed unit of it is dropped."""

NARROW = (torch.bfloat16, torch.float16)


class SharedLinear(Protocol):
    """The storage of one layer's weight, for all lanes."""

    def part(self, rank: int, degree: int) -> Matmul:
        """Return the product with the part that `rank` of `degree` works on."""


class Unit(Protocol):
    """A unit of a weight."""

    @property
    def multiply(self) -> Any:
        """Write the product of tokens, made by `Inputs`, into (tokens, out), which lies in one
        piece. It is read at each product.
        """


class Inputs(Protocol):
    """The input of a layer as its units multiply with it, made once for all of them."""

    def of(self, x: torch.Tensor) -> Any:
        """Return the input of units, of (tokens, in)."""

    def parts(self, made: Any, count: int) -> Sequence[Any]:
        """Cut the input into those of `count` equally wide units."""


class Tokens:
    """Tokens as they are: the `Inputs` of floats."""

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens."""
        return x

    def parts(self, made: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        """Return views. `chunk` is one call of C++, where `split` is Python's first."""
        return made.chunk(count, 1)


TOKENS = Tokens()


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


def unit_families(
    segments: Sequence[Segment],
) -> Iterator[tuple[list[Segment], list[list[slice]]]]:
    """Yield consecutive segments with equally many units, with the rows of each unit of them in
    the fused weight.
    """
    first = 0
    for count, run in groupby(segments, key=lambda s: s.units):
        family = list(run)
        past = first + len(family)
        yield family, [rows_of(segments, unit, count)[first:past] for unit in range(count)]
        first = past


class UnitColumns:
    """The products with units of a column-parallel weight. `families`: segments whose units lie
    together, with these units.
    """

    def __init__(
        self,
        families: Sequence[tuple[list[Segment], Sequence[Unit]]],
        inputs: Inputs = TOKENS,
    ) -> None:
        self._families, self._inputs = families, inputs

    def part(self, rank: int, degree: int) -> Matmul:
        """See `SharedLinear`."""
        parts = [
            _family_part(family, units, rank, degree, self._inputs)
            for family, units in self._families
        ]
        if len(parts) == 1:
            return parts[0]
        return lambda x: torch.cat([part(x) for part in parts], dim=-1)


class PackedColumns(UnitColumns):
    """Column-parallel: outputs are cut. Segments with equally many units are packed together, unit
    by unit.

    `pages`: keep units that may be dropped; None: no unit may be dropped.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        segments: Sequence[Segment],
        pack: Pack,
        pages: WeightPages | None = None,
    ) -> None:
        families: list[tuple[list[Segment], list[PackedUnit]]] = []
        for family, rows_by_unit in unit_families(segments):
            packed = []
            for rows in rows_by_unit:
                unit_bias = None if bias is None else torch.cat([bias[r] for r in rows])
                packed.append(
                    PackedUnit(torch.cat([weight[r] for r in rows]), unit_bias, pack, pages)
                )
            families.append((family, packed))
        super().__init__(families)
        self.units = PackedUnits([(family[0], packed) for family, packed in families])


def _family_part(
    segments: list[Segment], held: Sequence[Unit], rank: int, degree: int, inputs: Inputs
) -> Matmul:
    """Return the product with consecutive segments of the same number of units; a packed matrix
    holds one unit of each.
    """
    chosen = [held[u] for u in segments[0].units_of(rank, degree)]
    sizes = [segment.unit_size for segment in segments]
    if len(chosen) == 1:
        return _alone(chosen[0], sum(sizes), inputs)
    # segments that are copied at once
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    count, width = len(chosen), sum(sizes)

    def columns(x: torch.Tensor) -> torch.Tensor:
        flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        by_unit = flat.new_empty(count, flat.shape[0], width)
        made = inputs.of(flat)
        for unit, out in zip(chosen, by_unit.unbind(), strict=True):
            unit.multiply(made, out)
        ordered = _by_segment(by_unit, runs)
        return ordered if x.dim() == 2 else ordered.view(*x.shape[:-1], count * width)

    return columns


def _alone(unit: Unit, width: int, inputs: Inputs) -> Matmul:
    """Return the product with one unit, whose outputs are in order and need no sum."""

    def product(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 2:
            out = x.new_empty(x.shape[0], width)
            unit.multiply(inputs.of(x), out)
            return out
        out = x.new_empty(*x.shape[:-1], width)
        unit.multiply(inputs.of(x.reshape(-1, x.shape[-1])), out.view(-1, width))
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


class UnitRows:
    """The products with units of a row-parallel weight with `width` outputs. The first unit's has
    the bias.

    `dtype`: of the units' products, which are rounded to the input's type once they are added;
    None: the input's.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        segment: Segment,
        width: int,
        inputs: Inputs = TOKENS,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._units, self._segment, self._width = units, segment, width
        self._inputs, self._dtype = inputs, dtype

    def part(self, rank: int, degree: int) -> Matmul:
        """See `SharedLinear`. All inputs of the rank are made at once."""
        chosen = [self._units[u] for u in self._segment.units_of(rank, degree)]
        count, width, inputs, dtype = len(chosen), self._width, self._inputs, self._dtype
        if count == 1 and dtype is None:
            return _alone(chosen[0], width, inputs)

        def rows(x: torch.Tensor) -> torch.Tensor:
            flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
            products = flat.new_empty(count, flat.shape[0], width, dtype=dtype).unbind()
            parts = inputs.parts(inputs.of(flat), count)
            for unit, part, out in zip(chosen, parts, products, strict=True):
                unit.multiply(part, out)
            total = sum_of_units(list(products)).to(x.dtype)
            return total if x.dim() == 2 else total.view(*x.shape[:-1], width)

        return rows


class PackedRows(UnitRows):
    """Row-parallel: inputs are cut, and the partial products of a lane's units are added
    (`sum_of_units`).

    The bias is part of the first unit's product, so of the first rank's, as in vLLM. `pages`: as in
    `PackedColumns`.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        segment: Segment,
        pack: Pack,
        pages: WeightPages | None = None,
    ) -> None:
        parts = [columns.contiguous() for columns in weight.split(segment.unit_size, dim=1)]
        packed = [
            PackedUnit(part, None if unit else bias, pack, pages) for unit, part in enumerate(parts)
        ]
        super().__init__(packed, segment, weight.shape[0])
        self.units = PackedUnits([(segment, packed)])


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


class OrderedColumns:
    """Products with a column-parallel weight whose rows lie unit by unit.

    A rank's part is one product with a slice of rows, or two where ranks share KV heads. One copy
    puts the outputs in the order of the segments. A rank with one unit of each segment needs none.

    `product`: returns the product with some of the rows.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        product: Callable[[slice], Matmul],
        device: torch.device,
    ) -> None:
        self._order = UnitOrder(segments)
        self._product, self._device = product, device
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}

    def part(self, rank: int, degree: int) -> Matmul:
        """See `SharedLinear`."""
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
        return self._product(rows)

    def _in_order(self, product: Matmul, part: RankRows) -> Matmul:
        """Return a product whose outputs are put in the order of the segments, block by block."""
        size, blocks = part.blocks()
        if blocks not in self._indices:  # the ranks of a degree have the same one
            self._indices[blocks] = torch.tensor(blocks, device=self._device)
        index = self._indices[blocks]

        def columns(x: torch.Tensor) -> torch.Tensor:
            out = product(x)
            by_block = out.view(*out.shape[:-1], len(blocks), size)
            return by_block.index_select(-2, index).view(out.shape)

        return columns


class StridedColumns(OrderedColumns):
    """Column-parallel over one matrix, whose rows lie unit by unit: `keep_by_unit`.

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
        bias = None if bias is None else bias_by_unit(bias, segments)

        def product(rows: slice) -> Matmul:
            part, added = weight[rows], None if bias is None else bias[rows]
            return lambda x: torch.nn.functional.linear(x, part, added)

        super().__init__(segments, product, weight.device)
        self.units = units

    def part(self, rank: int, degree: int) -> Matmul:
        return guarded(super().part(rank, degree), self.units, rank, degree)

    def part_by_unit(self, rank: int, degree: int) -> Matmul:
        """See `OrderedColumns.part_by_unit`."""
        return guarded(super().part_by_unit(rank, degree), self.units, rank, degree)


def bias_by_unit(bias: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
    """Return a loaded bias in the order of the weight's rows: a copy unless it is in that order."""
    rows = UnitOrder(segments).loaded_rows()
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
        self._weight, self._bias, self._segment = weight, bias, segment

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
