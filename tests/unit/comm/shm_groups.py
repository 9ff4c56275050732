"""Ranks of a ShmGroup in processes or threads, the tensors that they contribute, and the sums."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from flying_serving.comm.shm import ShmGroup
from flying_serving.errors import EngineLost

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
