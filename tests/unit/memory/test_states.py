"""States that move between groups: each rank gets its part, from any ranks that have it."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from flying_serving.layout.shards import Segment
from flying_serving.memory.states import Place, StateCut, copy_states, runs

WIDEST = 4
GROUPED = (Segment(32, 8), Segment(6, 1), Segment(6, 1))
"""Channels of eight heads, which share one group."""
EVEN = (Segment(8, 8),)
CUTS = (StateCut(1, 1, GROUPED), StateCut(0, 0, EVEN))
SHAPES = ((3, 44), (8, 5))


def whole() -> list[torch.Tensor]:
    """The states of one engine, in two blocks."""
    return [torch.randn(2, *shape) for shape in SHAPES]


def parts_of(states: Sequence[torch.Tensor], place: Place) -> list[torch.Tensor]:
    """A rank's part of states."""
    found = []
    for cut, state in zip(CUTS, states, strict=True):
        of_rank = [range_ for _, range_ in runs(cut.segments, place)]
        index = torch.tensor([channel for run in of_rank for channel in run])
        found.append(state.index_select(1 + cut.dimension, index))
    return found


@pytest.mark.parametrize(("old", "new"), list(product((1, 2, 4), repeat=2)))
def test_every_rank_gets_its_part_of_a_state(old: int, new: int) -> None:
    states = whole()
    for rank in range(new):
        expected = parts_of(states, (rank, new))
        copied = [torch.zeros_like(part) for part in expected]
        for source in range(old):
            pair = parts_of(states, (source, old)), copied
            copy_states(CUTS, pair, ((source, old), (rank, new)), ((0, 1), (1, 0)))
        for cut, part, right in zip(CUTS, copied, expected, strict=True):
            source_block, target_block = (0, 1)[cut.number], (1, 0)[cut.number]
            assert torch.equal(part[target_block], right[source_block])
            assert not part[source_block].any()
