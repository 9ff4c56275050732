"""ShmGroup: values, the same bits on every rank, pieces and buffers."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.comm import shm_kernels
from flying_serving.comm.shm import SPLIT_BYTES, YIELDS, ShmGroup
from flying_serving.comm.shm_ranks import FLAG, word
from harness.examples import examples
from tests.unit.comm.shm_groups import (
    ANY,
    START_S,
    SUMMED,
    as_threads,
    bits,
    example,
    results,
    start,
    sum_in_order,
)

# ---- values


def reduce_many(group: ShmGroup, rank: int, world: int) -> list[bytes]:
    """All-reduce tensors of many dtypes, shapes and strides; return the bits of the sums."""
    sums = []
    shapes = [(), (1,), (3, 5), (0, 4), (1537,), (2, 3, 129), (70_001,), (300_000,)]
    for seed, (dtype, shape) in enumerate((d, s) for d in SUMMED for s in shapes):
        parts = [example(seed, r, shape, dtype) for r in range(world)]
        x = parts[rank].clone()
        assert group.all_reduce(x) is x
        assert torch.equal(x, sum_in_order(parts)), (dtype, shape)
        torch.testing.assert_close(x, torch.stack(parts).sum(0, dtype=dtype), rtol=2e-2, atol=0.2)
        sums.append(bits(x))
    strided = example(0, rank, (40, 60), torch.float32).t()[::2, 1:]
    group.all_reduce(strided)
    assert torch.equal(
        strided,
        sum_in_order([example(0, r, (40, 60), torch.float32).t()[::2, 1:] for r in range(world)]),
    )
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42, 3e38]) * (1 if rank else -1)
    sums.append(bits(group.all_reduce(special)))
    return sums


@pytest.mark.parametrize("world", [2, 3, 4])
def test_all_reduce_gives_every_rank_the_bits_of_the_ordered_sum(path: str, world: int) -> None:
    """Several dtypes, shapes, strides, sizes in one or more pieces, summed by all or shared out."""
    assert 4 * 300_000 > 1 << 20 > SPLIT_BYTES
    first, *others = results(start(reduce_many, path, world))
    assert all(sums == first for sums in others)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), world=st.integers(1, 4), slot_lines=st.integers(1, 5))
def test_every_collective_agrees_with_torch(
    data: st.DataObject, world: int, slot_lines: int
) -> None:
    """Any small shape, dimension and dtype, in slots smaller than the tensor or not."""
    shape = tuple(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4), "shape"))
    dim = data.draw(st.integers(-len(shape), len(shape) - 1), "dim")
    root = data.draw(st.integers(0, world - 1), "root")
    dtype, summed = (
        data.draw(st.sampled_from(ANY), "dtype"),
        data.draw(st.sampled_from(SUMMED), "summed"),
    )
    parts = [example(0, rank, shape, dtype) for rank in range(world)]
    terms = [example(1, rank, shape, summed) for rank in range(world)]

    def work(group: ShmGroup, rank: int) -> None:
        assert torch.equal(group.all_gather(parts[rank], dim), torch.cat(parts, dim))
        gathered = group.gather(
            parts[rank].mT.contiguous().mT if len(shape) > 1 else parts[rank], root, dim
        )
        assert gathered is None if rank != root else torch.equal(gathered, torch.cat(parts, dim))
        assert torch.equal(group.broadcast(parts[rank].clone(), root), parts[root])
        group.barrier()
        assert torch.equal(group.all_reduce(terms[rank].clone()), sum_in_order(terms))

    with TemporaryDirectory(dir="/dev/shm") as directory:
        as_threads(work, f"{directory}/group", world, slot_bytes=128 * slot_lines)


def test_large_tensors_and_strides(path: str) -> None:
    """Gather and broadcast in pieces that begin and end inside rows; broadcast into a strided
    tensor.
    """
    parts = [example(0, rank, (3, 500, 401), torch.float32) for rank in range(2)]

    def work(group: ShmGroup, rank: int) -> None:
        for dim in (0, 1, 2):
            assert torch.equal(group.all_gather(parts[rank], dim), torch.cat(parts, dim))
        x = parts[rank].clone().transpose(0, 2)
        assert group.broadcast(x, 1) is x
        assert torch.equal(x, parts[1].transpose(0, 2))

    as_threads(work, path, 2, slot_bytes=64 << 10)


def test_wrong_dtype_dimension_or_root_is_refused(path: str) -> None:
    group = ShmGroup(path, 0, 2)
    with pytest.raises(TypeError, match=r"torch\.bool"):
        group.all_reduce(torch.ones(2, dtype=torch.bool))
    with pytest.raises(IndexError):
        group.all_gather(torch.ones(2), 1)
    with pytest.raises(ValueError, match="rank 2"):
        group.broadcast(torch.ones(2), 2)
    group.close()


# ---- buffers


def interleave(group: ShmGroup, rank: int, world: int) -> int:
    """Do thousands of small collectives with pauses of this rank's own; check all that arrives."""
    common, own = random.Random(1), random.Random(100 + rank)
    for i in range(3000):
        kind, root, numel = common.randrange(6), common.randrange(world), common.randrange(1, 200)
        if own.random() < 0.03:
            time.sleep(own.random() * 0.002)
        x = torch.arange(numel) + 1000 * i + rank
        base = torch.arange(numel) + 1000 * i
        if kind == 0:
            assert torch.equal(group.all_reduce(x), base * world + world * (world - 1) // 2)
        elif kind == 1:
            assert torch.equal(group.all_gather(x), torch.cat([base + r for r in range(world)]))
        elif kind == 2:
            gathered = group.gather(x, root)
            assert gathered is None or torch.equal(
                gathered, torch.cat([base + r for r in range(world)])
            )
        elif kind == 3:
            assert torch.equal(group.broadcast(x, root), base + root)
        elif kind == 4:
            parts = 10_000_000 * torch.arange(world)[:, None]
            received = torch.stack([base + r for r in range(world)]) + parts[rank]
            assert torch.equal(group.all_to_all(x + parts), received)
        else:
            group.barrier()
    return group._sequence


@pytest.mark.parametrize("world", [2, 4])
def test_thousands_of_operations_with_pauses(path: str, world: int) -> None:
    """Ranks that run ahead and fall behind never see another operation's data."""
    assert results(start(interleave, path, world)) == [3000] * world


@settings(max_examples=examples(100), deadline=None)
@given(world=st.integers(2, 4), schedule=st.lists(st.integers(0, 3), max_size=200))
def test_ranks_in_any_order_of_steps_stay_within_two_operations(
    world: int, schedule: list[int]
) -> None:
    """Whichever rank moves next: a broadcast arrives whole, and nobody begins an operation two
    ahead of another's.
    """
    total = 6
    with TemporaryDirectory(dir="/dev/shm") as directory, ExitStack() as stack:
        groups = [
            ShmGroup(f"{directory}/group", rank, world, slot_bytes=128) for rank in range(world)
        ]
        for group in groups:
            stack.callback(group.close)
        done = [0] * world
        for rank in [rank % world for rank in schedule] + list(range(world)) * 2 * total:
            if done[rank] == total:
                continue
            sequence = done[rank] + 1
            source = sequence % world
            x = torch.tensor([sequence * 10 + rank])
            ranks = (0, 0) if rank == source else (source, source + 1)
            sent = 8 if rank == source else 0
            args = ((x.data_ptr(), sent), ranks, (x.data_ptr(), 0, 8, 8))
            if shm_kernels.gather(groups[rank]._group, sequence, 0, *args):
                done[rank] = sequence
                assert x.item() == sequence * 10 + source
            flags = [groups[0]._ranks.words[word(r, FLAG)] for r in range(world)]
            assert max(flags) <= min(done) + 2
        assert done == [total] * world


def test_wait_ends_when_another_rank_publishes(path: str) -> None:
    """The compiled wait loads the flag each time round, and without the GIL: one call of the kernel
    ends by itself.
    """
    waiting, last = ShmGroup(path, 0, 2), ShmGroup(path, 1, 2)
    barrier = ((0, 0), (0, 2), (0, 0, 0, 1))
    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(shm_kernels.gather, waiting._group, 1, 1 << 40, *barrier)
        time.sleep(0.05)
        assert not waiter.done()
        assert shm_kernels.gather(last._group, 1, YIELDS, *barrier)
        assert waiter.result(timeout=START_S)
    waiting.close()
    last.close()
