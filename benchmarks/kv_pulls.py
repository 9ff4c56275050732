"""Time pulls of KV between lanes on one device, tile by tile and by one kernel: `python -m
benchmarks.kv_pulls --device cuda`.

Both memories are in this process. KV has the shape of an 8B model (32 layers, 8 KV heads of 128,
bfloat16, blocks of 16 tokens), and keys beside values in one row, as on CUDA. Each row is a pull
into one member of a group from one peer, or from each member of a group into an engine alone.
Bandwidth counts each byte once: a plain copy of the device is printed beside it. On the CPU there
is no kernel to run, so only the loop is measured.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flying_serving.memory.kv_view import KVView, heads_of
from flying_serving.memory.tiles import TileCopy, copy_by_loop

HEADS, HEAD_SIZE, BLOCK_TOKENS = 8, 128, 16
ROUNDS, WARM_UPS = 7, 2
PLAIN_BYTES = 1 << 30
BAR = 10.0
"""Least bandwidth of the kernel, as a multiple of the loop's."""
LANES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (4, 1))
Copier = Callable[[TileCopy], None]


class Bench:
    """Copies on a device, each timed from its call until the device has done it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def median_s(self, work: Callable[[], None]) -> float:
        """Return the median over the rounds; the first rounds compile and touch the memory."""
        seconds = []
        for _ in range(WARM_UPS + ROUNDS):
            self._finish()
            began_s = time.perf_counter()
            work()
            self._finish()
            seconds.append(time.perf_counter() - began_s)
        return statistics.median(seconds[WARM_UPS:])


def lane(memory: torch.Tensor, layers: int, size: int, rank: int) -> KVView:
    """Return a rank's view of memory (bfloat16), which a group of `size` reads."""
    heads, tokens = heads_of(rank, size, HEADS), BLOCK_TOKENS * size
    shape = (layers, -1, len(heads), tokens, 2 * HEAD_SIZE)
    return KVView(list(memory.view(shape).unbind()), heads, tokens, HEADS)


def pull(
    memories: tuple[torch.Tensor, torch.Tensor],
    layers: int,
    lanes: tuple[int, int],
    tokens: int,
    copier: Copier,
) -> None:
    """Pull into rank 0 of the target its heads, from each rank of the source that has some."""
    blocks = [list(range(1, 1 + -(-tokens // (BLOCK_TOKENS * size)))) for size in lanes]
    target = lane(memories[1], layers, lanes[1], 0)
    for rank in range(lanes[0]):
        source = lane(memories[0], layers, lanes[0], rank)
        heads = [head for head in source.heads if head in target.heads]
        if heads:
            run = range(heads[0], heads[-1] + 1)
            copier(target.tiles_from(source, run, (blocks[0], blocks[1]), range(tokens)))


def memory_of(device: torch.device, layers: int, tokens: int) -> torch.Tensor:
    """Return KV memory for some tokens and a block that no request has."""
    blocks = 1 + -(-tokens // BLOCK_TOKENS)
    size = layers * blocks * HEADS * BLOCK_TOKENS * 2 * HEAD_SIZE
    return torch.randn(size, device=device, dtype=torch.bfloat16)


def copiers(device: torch.device) -> dict[str, Copier]:
    """Return the ways to copy tiles on a device, the loop first."""
    if device.type != "cuda":
        return {"loop": copy_by_loop}
    from flying_serving.memory.tile_kernel import copy_by_kernel

    return {"loop": copy_by_loop, "kernel": copy_by_kernel}


def check(device: torch.device, layers: int, tokens: int) -> None:
    """Exit with an error if two ways do not copy the same bytes."""
    source, first = (memory_of(device, layers, tokens) for _ in range(2))
    for lanes in LANES:
        results = []
        for copier in copiers(device).values():
            target = first.clone()
            pull((source, target), layers, lanes, tokens, copier)
            results.append(target.view(torch.int16))
        if any(not torch.equal(results[0], result) for result in results[1:]):
            raise SystemExit(f"{lanes[0]} -> {lanes[1]}: loop and kernel copy different bytes")


def plain_copy(bench: Bench, device: torch.device) -> float:
    """Return the GB/s of one contiguous copy."""
    source = torch.zeros(PLAIN_BYTES // 8, dtype=torch.int64, device=device)
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)

    return PLAIN_BYTES / bench.median_s(copy) / 1e9


def rows(
    bench: Bench, device: torch.device, layers: int, tokens: int
) -> list[tuple[tuple[int, int], dict[str, float]]]:
    """Return the seconds of each pull by each way, by lanes."""
    memories = memory_of(device, layers, tokens), memory_of(device, layers, tokens)
    return [
        (
            lanes,
            {
                name: bench.median_s(lambda c=copier, p=lanes: pull(memories, layers, p, tokens, c))
                for name, copier in copiers(device).items()
            },
        )
        for lanes in LANES
    ]


def shown(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    says = "" if row["way"] == "loop" else f"{row['ratio']:.1f} (bar {BAR:g})"
    return (
        f"{row['lanes']:>8} {row['tokens']:>7} {row['way']:>7} {row['took_s'] * 1e3:>9.3f} "
        f"{row['took_s'] / row['tokens'] * 1e6:>9.3f} {row['gb_s']:>7.1f}  {says}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 1024, 8192])
    parser.add_argument("--json", type=Path, help="write the rows to a file too")
    options = parser.parse_args()
    device = torch.device(options.device, 0 if options.device == "cuda" else None)
    bench = Bench(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    check(device, 2, 80)
    print(f"{name}, {options.layers} layers; a plain copy: {plain_copy(bench, device):.0f} GB/s")
    if device.type != "cuda":
        print("the kernel: not run, it needs a GPU")
    print(f"{'lanes':>8} {'tokens':>7} {'way':>7} {'ms':>9} {'us/token':>9} {'GB/s':>7}  ratio")
    written = []
    for tokens in options.tokens:
        for lanes, seconds in rows(bench, device, options.layers, tokens):
            copied_bytes = tokens * options.layers * HEADS // lanes[1] * 4 * HEAD_SIZE
            for way, took_s in seconds.items():
                row = {
                    "lanes": f"{lanes[0]} -> {lanes[1]}",
                    "tokens": tokens,
                    "way": way,
                    "took_s": took_s,
                    "gb_s": copied_bytes / took_s / 1e9,
                    "ratio": seconds["loop"] / took_s,
                }
                print(shown(row), flush=True)
                written.append(row)
    if options.json:
        options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
