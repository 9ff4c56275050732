"""The order in which the rows of a fused weight are kept: unit by unit of all segments.

A weight is loaded segment by segment: all of q, then all of k, then all of v. A lane's part of it
is then one run of rows in each segment. Kept unit by unit, the part is one run of rows, so one
matrix product. For two units of q, k, v:

    loaded:  q0 q1 k0 k1 v0 v1
    kept:    q0 k0 v0 q1 k1 v1

Where segments have different numbers of units (KV heads that ranks share), the rows are kept by the
most groups that all segments divide into. A rank that works on a part of a group has several runs.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from flying_serving.layout.shards import Segment

SCRATCH_BYTES = 64 * 1024 * 1024
"""Memory that a reordering needs beside the weight, if a column of the weight is no larger."""


@dataclass(frozen=True)
class RankRows:
    """The rows of a kept weight that a rank works on.

    Args:
        runs: the rows, in the fewest slices. There is one product for each.
        pieces: the outputs in the order of the segments: the number of a run, and columns of its
            product.
    """

    runs: tuple[slice, ...]
    pieces: tuple[tuple[int, slice], ...]

    @property
    def is_in_order(self) -> bool:
        """True if the output of the one product is in the order of the segments."""
        return len(self.runs) == len(self.pieces) == 1

    def blocks(self) -> tuple[int, tuple[int, ...]]:
        """Cut the output of the one product into the largest equal blocks of columns that keep the
        pieces whole. Return the columns of one, and all blocks in the order of the segments.
        """
        columns = [piece for _, piece in self.pieces]
        size = math.gcd(*(end for piece in columns for end in (piece.start, piece.stop)))
        blocks = [range(piece.start // size, piece.stop // size) for piece in columns]
        return size, tuple(chain.from_iterable(blocks))


class UnitOrder:
    """The places of the units of some segments in a weight that is kept unit by unit."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = tuple(segments)
        self._groups = math.gcd(*(segment.units for segment in segments))
        self._group_size = sum(segment.size for segment in segments) // self._groups

    def loaded_rows(self) -> list[slice]:
        """Return the rows of the loaded weight in the order in which they are kept."""
        rows = []
        for group in range(self._groups):
            start = 0
            for segment in self._segments:
                size = segment.size // self._groups
                rows.append(slice(start + group * size, start + (group + 1) * size))
                start += segment.size
        return _merged(rows)

    def rows_of(self, rank: int, degree: int) -> RankRows:
        """Return the rows of the kept weight that `rank` of `degree` works on."""
        pieces = _merged(self._places(rank, degree))
        runs = _merged(sorted(pieces, key=lambda piece: piece.start))
        return RankRows(tuple(runs), tuple(_in_run(piece, runs) for piece in pieces))

    def rows_of_units(self) -> dict[tuple[int, int], slice]:
        """Return the rows of each unit in the kept weight, by the numbers of its segment and of the
        unit.
        """
        return {
            (number, unit): self._row_of(number, unit)
            for number, segment in enumerate(self._segments)
            for unit in range(segment.units)
        }

    def _places(self, rank: int, degree: int) -> Iterator[slice]:
        """Yield the rows of each unit of a rank, segment by segment."""
        for number, segment in enumerate(self._segments):
            for unit in segment.units_of(rank, degree):
                yield self._row_of(number, unit)

    def _row_of(self, number: int, unit: int) -> slice:
        """Return the rows of a unit of a segment."""
        segment = self._segments[number]
        before = sum(other.size for other in self._segments[:number])
        group, place = divmod(unit, segment.units // self._groups)
        start = group * self._group_size + before // self._groups + place * segment.unit_size
        return slice(start, start + segment.unit_size)


def _merged(slices: Iterable[slice]) -> list[slice]:
    """Return slices of which none begins where the one before it ends."""
    merged: list[slice] = []
    for part in slices:
        if merged and merged[-1].stop == part.start:
            merged[-1] = slice(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return merged


def _in_run(piece: slice, runs: Sequence[slice]) -> tuple[int, slice]:
    """Return the number of the run that a piece is in, and its columns in the run's product."""
    for number, run in enumerate(runs):
        if run.start <= piece.start < run.stop:
            return number, slice(piece.start - run.start, piece.stop - run.start)
    raise AssertionError(f"rows {piece.start} to {piece.stop} are in no run")


def keep_by_unit(
    weight: torch.Tensor, segments: Sequence[Segment], scratch_bytes: int = SCRATCH_BYTES
) -> bool:
    """Reorder the rows of a loaded weight (out, in) in place: unit by unit. Return whether that is
    another order.

    Some columns at a time, so that the memory beside the weight is at most `scratch_bytes`, or one
    column.
    """
    rows = UnitOrder(segments).loaded_rows()
    if len(rows) == 1:
        return False
    # rows of a weight without data are all the same number
    if weight.stride(0) == 0:
        return True
    column_bytes = weight.shape[0] * weight.element_size()
    for columns in weight.split(max(1, scratch_bytes // column_bytes), dim=1):
        columns.copy_(torch.cat([columns[part] for part in rows]))
    return True
