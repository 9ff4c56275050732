"""How the bytes of one linear layer are kept so that a lane of any degree can multiply with its part of them.

Two ways behind one interface. `Strided` keeps the weight as it was loaded and hands out views (GPUs: a leading
dimension costs nothing). `Packed` keeps each unit in the library's blocked format (CPUs: oneDNN is up to twice as fast
on packed weights at small batches, and a packed matrix cannot be cut afterwards). Either way there is one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

import torch

from flying_serving.layout.shards import Segment

Matmul = Callable[[torch.Tensor], torch.Tensor]
"""(tokens, in) -> (tokens, out)."""
Pack = Callable[[torch.Tensor, torch.Tensor | None], Matmul]
"""Turn a weight (out, in) and a bias (out) into a product that does not need the weight any more."""


class SharedLinear(Protocol):
    """The storage of one layer's weight, for all lanes."""

    def part(self, rank: int, degree: int) -> Matmul:
        """The product with the part that `rank` of `degree` works on."""
        ...


def rows_of_units(segments: Sequence[Segment], unit: int) -> list[slice]:
    """Rows of the fused weight that unit `unit` of each segment covers."""
    rows, start = [], 0
    for segment in segments:
        first = start + unit * segment.unit_size
        rows.append(slice(first, first + segment.unit_size))
        start += segment.size
    return rows


class PackedColumns:
    """Column-parallel: outputs are cut. Segments with equally many units are packed together, unit by unit."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, segments: Sequence[Segment], pack: Pack
    ) -> None:
        self._families: list[_Family] = []
        start = 0
        for _, run in groupby(segments, key=lambda s: s.units):
            family = list(run)
            size = sum(segment.size for segment in family)
            rows = slice(start, start + size)
            self._families.append(_Family(weight[rows], None if bias is None else bias[rows], family, pack))
            start += size

    def part(self, rank: int, degree: int) -> Matmul:
        parts = [family.part(rank, degree) for family in self._families]
        if len(parts) == 1:
            return parts[0]
        return lambda x: torch.cat([part(x) for part in parts], dim=-1)


class _Family:
    """Consecutive segments with the same number of units: one packed matrix per unit holds that unit of each."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, segments: list[Segment], pack: Pack) -> None:
        self._segments = segments
        self._units = []
        for unit in range(segments[0].units):
            rows = rows_of_units(segments, unit)
            unit_bias = None if bias is None else torch.cat([bias[r] for r in rows])
            self._units.append(pack(torch.cat([weight[r] for r in rows]), unit_bias))

    def part(self, rank: int, degree: int) -> Matmul:
        chosen = [self._units[u] for u in self._segments[0].units_of(rank, degree)]
        if len(chosen) == 1:
            return chosen[0]
        sizes = [segment.unit_size for segment in self._segments]
        if len(sizes) == 1:
            return lambda x: torch.cat([unit(x) for unit in chosen], dim=-1)
        order = range(len(sizes))

        def columns(x: torch.Tensor) -> torch.Tensor:
            outs = [unit(x).split(sizes, dim=-1) for unit in chosen]
            return torch.cat([out[s] for s in order for out in outs], dim=-1)

        return columns


class PackedRows:
    """Row-parallel: inputs are cut, and the partial products of a lane's units are added."""

    def __init__(self, weight: torch.Tensor, segment: Segment, pack: Pack) -> None:
        self._segment = segment
        self._units = [pack(columns.contiguous(), None) for columns in weight.split(segment.unit_size, dim=1)]

    def part(self, rank: int, degree: int) -> Matmul:
        chosen = [self._units[u] for u in self._segment.units_of(rank, degree)]
        if len(chosen) == 1:
            return chosen[0]
        size = self._segment.unit_size

        def rows(x: torch.Tensor) -> torch.Tensor:
            return sum_in_pairs([unit(part) for unit, part in zip(chosen, x.split(size, dim=-1), strict=True)])

        return rows


def sum_in_pairs(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of a power of two of tensors, neighbours first, in place.

    A group of two sums over its ranks in the same order, so degrees 1 and 2 of two engines agree bit for bit.
    """
    while len(parts) > 1:
        parts = [left.add_(right) for left, right in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


class StridedColumns:
    """Column-parallel over the weight as it was loaded: one product per segment, written into one output."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, segments: Sequence[Segment]) -> None:
        self._weight = weight
        self._bias = bias
        self._segments = tuple(segments)

    def part(self, rank: int, degree: int) -> Matmul:
        if degree == 1:
            weight, bias = self._weight, self._bias
            return lambda x: torch.nn.functional.linear(x, weight, bias)
        pieces, start = [], 0
        for segment in self._segments:
            units = segment.units_of(rank, degree)
            rows = slice(start + units.start * segment.unit_size, start + units.stop * segment.unit_size)
            pieces.append((self._weight[rows].t(), None if self._bias is None else self._bias[rows]))
            start += segment.size
        return _segmented(pieces)


def _segmented(pieces: list[tuple[torch.Tensor, torch.Tensor | None]]) -> Matmul:
    widths = [weight.shape[1] for weight, _ in pieces]

    def columns(x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = flat.new_empty(flat.shape[0], sum(widths))
        for (weight, bias), target in zip(pieces, out.split(widths, dim=1), strict=True):
            torch.mm(flat, weight, out=target)
            if bias is not None:
                target.add_(bias)
        return out.view(*x.shape[:-1], sum(widths))

    return columns


class StridedRows:
    """Row-parallel over the weight as it was loaded: a column slice; GEMM libraries take a leading dimension."""

    def __init__(self, weight: torch.Tensor, segment: Segment) -> None:
        self._weight = weight
        self._segment = segment

    def part(self, rank: int, degree: int) -> Matmul:
        units = self._segment.units_of(rank, degree)
        weight = self._weight[:, units.start * self._segment.unit_size : units.stop * self._segment.unit_size]
        return lambda x: torch.nn.functional.linear(x, weight)
