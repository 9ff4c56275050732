"""ShmGroup.all_to_all: part `rank` of each rank's tensor, in pieces or not, between processes."""

import math
import os
import time
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.comm.shm import SLOT_BYTES, ShmGroup
from flying_serving.errors import CollectiveTimeout, EngineLost
from harness.examples import examples
from tests.unit.comm.shm_groups import ANY, DEADLINE_S, as_threads, bits, example, results, start

SHAPES = ((), (1,), (0, 4), (3, 5), (1537,), (2, 3, 129), (350_003,))
"""Of a part."""


def parts_of(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that a rank brings, and that every rank can compute."""
    return example(seed, rank, shape, torch.float32).to(dtype)


def own(tensors: list[torch.Tensor], rank: int) -> torch.Tensor:
    """Return what a rank gets."""
    return torch.stack([x[rank] for x in tensors])


def exchange_many(group: ShmGroup, rank: int, world: int) -> int:
    """Exchange tensors of many dtypes, shapes and strides; return how many operations it took."""
    for seed, (dtype, shape) in enumerate((d, s) for d in ANY for s in SHAPES):
        tensors = [parts_of(seed, r, (world, *shape), dtype) for r in range(world)]
        before = tensors[rank].clone()
        got = group.all_to_all(tensors[rank])
        assert got.dtype == dtype and got.is_contiguous()
        assert bits(got) == bits(own(tensors, rank)), (dtype, shape)
        assert bits(tensors[rank]) == bits(before), "what is sent does not change"
    strided = [parts_of(0, r, (40, 3 * world), torch.float32).t()[::3, 1:] for r in range(world)]
    assert torch.equal(group.all_to_all(strided[rank]), own(strided, rank))
    apart = [parts_of(1, r, (2 * world, 70, 3), torch.bfloat16)[::2, :65] for r in range(world)]
    assert torch.equal(group.all_to_all(apart[rank]), own(apart, rank))
    return group._sequence


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_each_rank_gets_its_part_of_every_rank(path: str, world: int) -> None:
    """Shares in one or more pieces; nothing at all takes no operation."""
    sizes = [dtype.itemsize * math.prod(shape) for dtype in ANY for shape in SHAPES]
    operations = 2 + sum(-(-nbytes // (SLOT_BYTES // world)) for nbytes in sizes)
    assert results(start(exchange_many, path, world)) == [operations] * world


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), world=st.integers(1, 4), slot_lines=st.integers(1, 5))
def test_any_tensor_in_slots_of_any_size(data: st.DataObject, world: int, slot_lines: int) -> None:
    """Pieces may begin and end inside elements."""
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3), "shape of a part"))
    dtype = data.draw(st.sampled_from(ANY), "dtype")
    tensors = [parts_of(0, rank, (world, *shape), dtype) for rank in range(world)]
    if data.draw(st.booleans(), "elements apart") and shape:
        tensors = [x.mT.contiguous().mT for x in tensors]

    def work(group: ShmGroup, rank: int) -> None:
        for _ in range(3):
            assert torch.equal(group.all_to_all(tensors[rank]), own(tensors, rank))

    with TemporaryDirectory(dir="/dev/shm") as directory:
        as_threads(work, f"{directory}/group", world, slot_bytes=128 * slot_lines)


def test_tensor_of_another_number_of_parts_is_refused(path: str) -> None:
    """Before the other ranks are waited for: the group goes on."""

    def work(group: ShmGroup, rank: int) -> None:
        with pytest.raises(ValueError, match=r"^all_to_all of \(4, 1\): .* each of 2 ranks$"):
            group.all_to_all(torch.ones(4, 1))
        assert group.all_to_all(torch.tensor([[rank], [10 + rank]])).tolist() == [
            [10 * rank],
            [10 * rank + 1],
        ]

    as_threads(work, path, 2)


# ---- losses


def exchange_in_two_pieces(group: ShmGroup, rank: int, world: int) -> None:
    """Exchange until a rank is lost: the last one, between the pieces of its third exchange."""
    run = group._run

    def run_or_exit(*args: Any) -> None:
        if rank == world - 1 and group._sequence == 5:
            os._exit(1)
        run(*args)

    group._run = run_or_exit  # type: ignore[method-assign]
    for _ in range(4):
        group.all_to_all(torch.zeros(world, SLOT_BYTES // world + 1, dtype=torch.uint8))


def test_rank_that_is_lost_between_pieces_is_an_error_not_a_hang(path: str) -> None:
    """The others wait for its second piece, and are told which rank it was."""
    begin_s = time.monotonic()
    lost = results(start(exchange_in_two_pieces, path, 3)[:2])
    assert time.monotonic() - begin_s < DEADLINE_S
    assert all(isinstance(error, EngineLost) for error in lost)
    assert all(str(error).startswith("all_to_all (sequence 6): ") for error in lost), lost
    assert any("exited or closed: engine 12 (process" in str(error) for error in lost), lost


def test_deadline_names_the_missing_rank(path: str) -> None:
    """And the group stays ended."""
    group = ShmGroup(path, 0, 2, deadline_s=0.05, names=["engine 4", "engine 5"])
    with pytest.raises(
        CollectiveTimeout,
        match=r"all_to_all \(sequence 1\): waited \d+\.\d s for engine 5 \(not attached\)",
    ):
        group.all_to_all(torch.ones(2, 3))
    with pytest.raises(EngineLost, match=r"all_to_all .*aborted because of engine 5"):
        group.all_to_all(torch.ones(2, 3))
    group.close()


def test_closed_group_refuses(path: str) -> None:
    group = ShmGroup(path, 0, 2)
    group.close()
    with pytest.raises(ValueError, match="all_to_all on a closed group"):
        group.all_to_all(torch.ones(2, 3))
