"""Recurrent states of a lane, in this process or in a peer: which part a rank has, and its copy
(torch, no vLLM).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flying_serving.layout.shards import Segment


@dataclass(frozen=True)
class StateCut:
    """How ranks share a state tensor, whose first dimension is the blocks.

    `number`: the place of its block among a request's blocks of states. `dimension`: the cut one.
    `segments`: the parts of it, as one engine has them, in units that a rank does not cut.
    """

    number: int
    dimension: int
    segments: tuple[Segment, ...]


Place = tuple[int, int]
"""A rank and the degree of its group."""


def runs(segments: Sequence[Segment], place: Place) -> Iterator[tuple[int, range]]:
    """Yield for each segment where a rank's part begins in its own tensor, and the part in that of
    one engine.
    """
    own = whole = 0
    for segment in segments:
        units = segment.units_of(*place)
        size = segment.unit_size
        yield own, range(whole + units.start * size, whole + units.stop * size)
        own += len(units) * size
        whole += segment.size


def shared_runs(
    segments: Sequence[Segment], source: Place, target: Place
) -> Iterator[tuple[int, int, int]]:
    """Yield the parts that two ranks have in common: where each begins in the source's and in the
    target's tensor, and its size.
    """
    pairs = zip(runs(segments, source), runs(segments, target), strict=True)
    for (from_start, from_run), (to_start, to_run) in pairs:
        start, stop = max(from_run.start, to_run.start), min(from_run.stop, to_run.stop)
        if start < stop:
            yield from_start + start - from_run.start, to_start + start - to_run.start, stop - start


def copy_states(
    cuts: Sequence[StateCut],
    tensors: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    places: tuple[Place, Place],
    blocks: tuple[Sequence[int], Sequence[int]],
) -> None:
    """Copy the parts of a request's states that two ranks have in common.

    Each pair is of the source and of the target: the state tensors, as in `cuts`; the places; the
    request's blocks of states.
    """
    for cut, source, target in zip(cuts, *tensors, strict=True):
        old, new = source[blocks[0][cut.number]], target[blocks[1][cut.number]]
        for from_start, to_start, size in shared_runs(cut.segments, *places):
            part = old.narrow(cut.dimension, from_start, size)
            new.narrow(cut.dimension, to_start, size).copy_(part)
