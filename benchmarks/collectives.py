"""Time the all-reduce of ShmGroup and of gloo by size and number of ranks: `python -m
benchmarks.collectives`.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.queues import Queue

import torch
import torch.distributed as dist

from flying_serving.comm.shm import ShmGroup

SIZES = (1536, 8192, 32_768, 200_000, 1_048_576, 2048 * 4096)  # float32 elements
ROUNDS = 5
ELEMENTS_PER_ROUND = 8_000_000  # so that each size takes about as long
MAX_CALLS_PER_ROUND = 2000


def call_us(all_reduce: Callable[[torch.Tensor], object], numel: int) -> float:
    """Return the median over the rounds of the time of one call, in microseconds."""
    x = torch.zeros(numel)
    calls = max(3, min(MAX_CALLS_PER_ROUND, ELEMENTS_PER_ROUND // numel))
    rounds = []
    for _ in range(1 + ROUNDS):
        begin_s = time.perf_counter()
        for _ in range(calls):
            all_reduce(x)
        rounds.append((time.perf_counter() - begin_s) / calls * 1e6)
    return statistics.median(rounds[1:])  # the first touches the memory


def measure(
    kind: str, rank: int, world: int, directory: str, results: "Queue[list[float]]"
) -> None:
    """Run as one rank; rank 0 puts the times in microseconds of all sizes."""
    torch.set_num_threads(1)
    if kind == "shm":
        group = ShmGroup(f"{directory}/group", rank, world)
        times_us = [call_us(group.all_reduce, numel) for numel in SIZES]
        group.close()
    else:
        store = dist.FileStore(f"{directory}/store", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        times_us = [call_us(dist.all_reduce, numel) for numel in SIZES]
        dist.destroy_process_group()
    if rank == 0:
        results.put(times_us)


def run(kind: str, world: int) -> list[float]:
    """Start the ranks and return the times in microseconds of all sizes."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        results: Queue[list[float]] = context.Queue()
        ranks = [
            context.Process(target=measure, args=(kind, r, world, directory, results))
            for r in range(world)
        ]
        for rank in ranks:
            rank.start()
        times_us = results.get(timeout=300)
        for rank in ranks:
            rank.join()
    return times_us


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument("--kinds", nargs="+", choices=["shm", "gloo"], default=["shm", "gloo"])
    args = parser.parse_args()
    print(
        f"all-reduce of float32, microseconds per call (median of {ROUNDS} rounds); "
        f"{os.cpu_count()} processors"
    )
    print(f"{'ranks':>5} {'kind':>5}" + "".join(f"{numel:>12,}" for numel in SIZES))
    for world in args.worlds:
        for kind in args.kinds:
            row = "".join(f"{us:>12,.1f}" for us in run(kind, world))
            print(f"{world:>5} {kind:>5}{row}", flush=True)


if __name__ == "__main__":
    main()
