"""ShmGroup: values, the same bits on every rank, pieces and buffers, and that no wait outlives its
reason.
"""

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.comm import shm_kernels
from flying_serving.comm.shm import SPLIT_BYTES, YIELDS, ShmGroup
from flying_serving.comm.shm_ranks import FLAG, word
from flying_serving.errors import CollectiveTimeout, EngineLost

CONTEXT = get_context("forkserver")  # as spawn, but one process imports torch for all
CONTEXT.set_forkserver_preload(["torch", "flying_serving.comm.shm"])
START_S = 60.0
DEADLINE_S = 60.0
"""Of a group that is not told another one: longer than any test."""
SUMMED = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.int64)
ANY = (torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.int64)


def serve(
    work: Callable[..., Any],
    path: str,
    rank: int,
    world: int,
    options: dict[str, Any],
    end: Connection,
) -> None:
    """Run `work` as one rank, in a process of its own; send what it returns, or the EngineLost it
    raises.
    """
    torch.set_num_threads(1)
    group = ShmGroup(path, rank, world, names=[f"engine {10 + r}" for r in range(world)], **options)
    try:
        end.send(work(group, rank, world))
    except EngineLost as error:
        end.send(error)
    group.close()


def start(
    work: Callable[..., Any], path: str, world: int, ranks: range | None = None, **options: Any
) -> list[tuple[BaseProcess, Connection]]:
    """Start `work` in a process for each rank."""
    started: list[tuple[BaseProcess, Connection]] = []
    for rank in ranks or range(world):
        here, there = CONTEXT.Pipe()
        process = CONTEXT.Process(
            target=serve, args=(work, path, rank, world, options, there), daemon=True
        )
        process.start()
        there.close()
        started.append((process, here))
    return started


def results(started: list[tuple[BaseProcess, Connection]]) -> list[Any]:
    """Return what the ranks sent."""
    sent = []
    for process, end in started:
        assert end.poll(START_S), "a rank hangs"
        sent.append(end.recv())
        process.join(START_S)
    return sent


def as_threads(
    work: Callable[[ShmGroup, int], None], path: str, world: int, **options: Any
) -> None:
    """Run `work` for all ranks in threads of this process; a rank that fails aborts the group."""

    def run(group: ShmGroup, rank: int) -> None:
        try:
            work(group, rank)
        except AssertionError:
            group._ranks.abort(rank)
            raise

    with ExitStack() as stack, ThreadPoolExecutor(world) as pool:
        groups = [ShmGroup(path, rank, world, **options) for rank in range(world)]
        for group in groups:
            stack.callback(group.close)
        ended = [pool.submit(run, group, rank).exception for rank, group in enumerate(groups)]
        failed = [error for wait in ended if (error := wait())]
        for error in sorted(failed, key=lambda error: isinstance(error, EngineLost)):
            raise error  # the cause, not what the others saw of it


def example(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that a rank contributes: every rank can compute everyone's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 10).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum that `all_reduce` promises: in the order of the ranks, 16-bit floats in
    float32.
    """
    wide = [
        part.float() if part.dtype in (torch.bfloat16, torch.float16) else part for part in parts
    ]
    total = wide[0].clone()
    for part in wide[1:]:
        total += part
    return total.to(parts[0].dtype)


def bits(x: torch.Tensor) -> bytes:
    """Return the bytes of a tensor."""
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


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


@settings(max_examples=60, deadline=None)
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


def test_what_cannot_be_done_is_refused(path: str) -> None:
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
        kind, root, numel = common.randrange(5), common.randrange(world), common.randrange(1, 200)
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
        else:
            group.barrier()
    return group._sequence


@pytest.mark.parametrize("world", [2, 4])
def test_thousands_of_operations_with_pauses(path: str, world: int) -> None:
    """Ranks that run ahead and fall behind never see another operation's data."""
    assert results(start(interleave, path, world)) == [3000] * world


@settings(max_examples=100, deadline=None)
@given(world=st.integers(2, 4), schedule=st.lists(st.integers(0, 3), max_size=200))
def test_any_order_of_steps(world: int, schedule: list[int]) -> None:
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


def test_a_wait_sees_what_is_published_meanwhile(path: str) -> None:
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


# ---- ends


def wait_in_barrier(group: ShmGroup, rank: int, world: int) -> tuple[float, str, str]:
    """All-reduce once, then wait in a barrier; return when that failed, with what class and
    message.
    """
    group.all_reduce(torch.ones(3))
    try:
        group.barrier()
    except EngineLost as error:
        return time.monotonic(), type(error).__name__, str(error)
    raise AssertionError("the barrier ended")


def stay_out(group: ShmGroup, rank: int, world: int) -> None:
    """Do not come to the barrier, until the group is aborted."""
    group.all_reduce(torch.ones(3))
    while not group._ranks.words[0]:
        time.sleep(0.01)


def arrive_overdue(group: ShmGroup, rank: int, world: int) -> tuple[float, str, str]:
    """Do as `wait_in_barrier`, but the last rank comes to the barrier when the others have given
    up.

    Their deadline is short from when both of them wait. Before, it would also bound how long
    processes take to start.
    """
    if rank == world - 1:
        stay_out(group, rank, world)
        try:
            group.barrier()
        except EngineLost as error:
            return time.monotonic(), type(error).__name__, str(error)
        raise AssertionError("the barrier ended")

    def shorten() -> None:
        wait_until_two_wait(group.path)
        group._ranks.deadline_s = 0.5

    threading.Thread(target=shorten, daemon=True).start()
    return wait_in_barrier(group, rank, world)


def test_deadline_names_who_is_missing_and_where(path: str) -> None:
    """The rank that reaches the deadline first tells the others, and the group stays closed to the
    last one.
    """
    sent = results(start(arrive_overdue, path, 3))
    by_class = {kind: message for _, kind, message in sent}
    message = by_class.pop("CollectiveTimeout")
    told = re.fullmatch(
        r"barrier \(sequence 2\): waited (\d+\.\d) s for engine 12 \(process \d+, at sequence 1\)",
        message,
    )
    assert told, message
    assert float(told[1]) >= 0.5
    assert by_class == {
        "EngineLost": "barrier (sequence 2): the group was aborted because of engine 12"
    }


def test_deadline_names_a_rank_that_never_attached(path: str) -> None:
    """As above, in the first operation, and the group stays ended."""
    group = ShmGroup(path, 0, 2, deadline_s=0.05, names=["engine 4", "engine 5"])
    with pytest.raises(
        CollectiveTimeout,
        match=r"all_reduce \(sequence 1\): waited \d+\.\d s for engine 5 \(not attached\)",
    ):
        group.all_reduce(torch.ones(1))
    with pytest.raises(EngineLost, match="aborted because of engine 5"):
        group.broadcast(torch.ones(1), 0)
    group.close()


def wait_until_two_wait(group_path: str) -> None:
    """Return when ranks 0 and 1 have published operation 2."""
    watched = Path(group_path)
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if watched.exists() and watched.stat().st_size:
            with watched.open("rb") as file:
                header = memoryview(file.read(shm_kernels.HEADER_BYTES)).cast("q")
            if all(header[word(rank, FLAG)] == 2 for rank in (0, 1)):
                return
        time.sleep(0.005)
    raise AssertionError("the ranks do not wait")


def test_killed_rank_is_an_error_not_a_hang(path: str) -> None:
    """The others see the system drop its lock."""
    started = start(wait_in_barrier, path, 3, range(2)) + start(stay_out, path, 3, range(2, 3))
    wait_until_two_wait(path)
    begin_s = time.monotonic()
    started[2][0].kill()
    sent = results(started[:2])
    started[2][0].join()
    assert all(at_s - begin_s < DEADLINE_S and kind == "EngineLost" for at_s, kind, _ in sent)
    assert any("exited or closed: engine 12 (process" in message for _, _, message in sent)


def interrupted(group: ShmGroup, rank: int, world: int) -> Any:
    """Wait in a barrier; rank 0 is interrupted there."""
    if rank:
        return wait_in_barrier(group, rank, world)
    group.all_reduce(torch.ones(3))
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt() -> None:
        wait_until_two_wait(group.path)
        signal.raise_signal(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        group.barrier()
    return None


def test_an_interrupt_is_served_and_ends_the_group(path: str) -> None:
    """A signal handler runs while its process waits, and the ranks that wait with it are told."""
    _, (_, kind, message), _ = results(
        start(interrupted, path, 3, range(2)) + start(stay_out, path, 3, range(2, 3))
    )
    assert (kind, message) == (
        "EngineLost",
        "barrier (sequence 2): the group was aborted because of engine 10",
    )


def test_abort_from_another_thread(path: str) -> None:
    """`abort` while another thread waits, and afterwards."""
    group = ShmGroup(path, 0, 2)
    threading.Timer(0.05, group._ranks.abort, [1]).start()
    for _ in range(2):
        with pytest.raises(EngineLost, match="rank 1"):
            group.barrier()
    group._ranks.abort(0)
    with pytest.raises(EngineLost, match="rank 1"):
        group.barrier()
    group.close()
    group._ranks.abort(0)


# ---- the file


def test_a_place_is_taken_once(path: str) -> None:
    """Also after it was left: what a file holds cannot be begun again."""
    group = ShmGroup(path, 0, 2, names=["a", "b"])
    with pytest.raises(ValueError, match="attached to as a before"):
        ShmGroup(path, 0, 2, names=["a", "b"])
    group.close()
    with pytest.raises(ValueError, match="before"):
        ShmGroup(path, 0, 2)
    with pytest.raises(ValueError, match="not for 3 ranks"):
        ShmGroup(path, 0, 3)


def test_a_rank_that_is_not_needed_may_leave(path: str) -> None:
    """A broadcast goes on without a third rank that took part in the operation before."""
    groups = [ShmGroup(path, rank, 3) for rank in range(3)]
    for rank in (2, 1, 0):
        groups[rank].gather(torch.tensor([rank]), 0)
    groups[2].close()
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(groups[1].broadcast, torch.tensor([0]), 0)
        time.sleep(0.1)
        groups[0].broadcast(torch.tensor([7]), 0)
        assert got.result().item() == 7
    for group in groups:
        group.close()


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 2},
        {"rank": -1},
        {"world": 512},
        {"slot_bytes": 100},
        {"slot_bytes": 0},
        {"names": ["a"]},
    ],
)
def test_settings_are_checked_before_a_file_is_made(path: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ShmGroup(path, **{"rank": 0, "world": 2, **options})
    assert not Path(path).exists()


def test_close(path: str) -> None:
    """It can be repeated; nothing is left open; a closed group refuses; a rank may leave what it
    has published.
    """
    before = len(os.listdir("/proc/self/fd"))
    groups = [ShmGroup(path, rank, 2) for rank in range(2)]
    groups[0].broadcast(torch.tensor([7]), 0)
    for _ in range(2):
        groups[0].close()
    assert groups[1].broadcast(torch.tensor([0]), 0).item() == 7
    with pytest.raises(EngineLost, match="exited or closed: rank 0"):
        groups[1].barrier()
    groups[1].close()
    with pytest.raises(ValueError, match="closed"):
        groups[1].barrier()
    assert len(os.listdir("/proc/self/fd")) == before
