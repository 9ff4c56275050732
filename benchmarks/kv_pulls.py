"""Time pulls of KV between lanes on one device, tile by tile and by one kernel: `python -m
benchmarks.kv_pulls --device cuda`.

Both memories are in this process. KV has the shape of an 8B model (32 layers, 8 KV heads of 128,
bfloat16, blocks of 16 tokens), and keys beside values in one row, as on CUDA. Each row is a pull
into one member of a group from one peer, or from each member of a group into an engine alone. The
views of both memories are made before, as engines keep them. A row has the time until the device
is done, and how much of it the call takes on the host. Bandwidth counts each byte once: a plain
copy of the device is printed beside it. On the CPU there is no kernel to run, so only the loop is
measured.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flying_serving.memory.kv_view import KVView, heads_of
from flying_serving.memory.tiles import TileCopy, copy_by_loop

HEADS, HEAD_SIZE, BLOCK_TOKENS = 8, 128, 16
ROUNDS, WARM_UPS = 7, 2
PLAIN_BYTES = 1 << 30
BAR, LEAST_BAR, MANY_TOKENS = 10.0, 5.0, 8192
"""Least bandwidth of the kernel, as a multiple of the loop's: for many tokens from or into a group,
and otherwise.

The loop launches a copy for each tile of 16 tokens. Between engines alone it had up to 116 GB/s, of
some 1,400 that the device can copy, so ten times is too near to that. For few tokens a pull is the
time of its calls.
"""
LANES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (4, 1))
Copier = Callable[[TileCopy], None]


class Took(NamedTuple):
    """Seconds of a pull: until the device is done, and of the call on the host."""

    done_s: float
    call_s: float


class Pull(NamedTuple):
    """The views of a pull: each rank's of the source, and rank 0's of the target."""

    sources: list[KVView]
    target: KVView


def bar(lanes: tuple[int, int], tokens: int) -> float:
    """Return the bar of a pull."""
    return BAR if max(lanes) > 1 and tokens >= MANY_TOKENS else LEAST_BAR


class Bench:
    """Copies on a device, timed from the call."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def median(self, work: Callable[[], None]) -> Took:
        """Return the medians over the rounds; the first rounds compile and touch the memory."""
        rounds = []
        for _ in range(WARM_UPS + ROUNDS):
            self._finish()
            began_s = time.perf_counter()
            work()
            called_s = time.perf_counter()
            self._finish()
            rounds.append((time.perf_counter() - began_s, called_s - began_s))
        return Took(*map(statistics.median, zip(*rounds[WARM_UPS:], strict=True)))


def lane(memory: torch.Tensor, layers: int, size: int, rank: int) -> KVView:
    """Return a rank's view of memory (bfloat16), which a group of `size` reads."""
    heads, tokens = heads_of(rank, size, HEADS), BLOCK_TOKENS * size
    shape = (layers, -1, len(heads), tokens, 2 * HEAD_SIZE)
    return KVView(list(memory.view(shape).unbind()), heads, tokens, HEADS)


def views(memories: tuple[torch.Tensor, torch.Tensor], layers: int, lanes: tuple[int, int]) -> Pull:
    """Return the views of a pull between two memories."""
    source, target = memories
    ranks = [lane(source, layers, lanes[0], rank) for rank in range(lanes[0])]
    return Pull(ranks, lane(target, layers, lanes[1], 0))


def pull(between: Pull, tokens: int, copier: Copier) -> None:
    """Pull into rank 0 of the target its heads, from each rank of the source that has some."""
    target = between.target
    for source in between.sources:
        heads = [head for head in source.heads if head in target.heads]
        if heads:
            run = range(heads[0], heads[-1] + 1)
            blocks = _blocks(source, tokens), _blocks(target, tokens)
            copier(target.tiles_from(source, run, blocks, range(tokens)))


def _blocks(view: KVView, tokens: int) -> list[int]:
    """Return blocks for some tokens; the first block is of no request."""
    return list(range(1, 1 + -(-tokens // view.block_tokens)))


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
            pull(views((source, target), layers, lanes), tokens, copier)
            results.append(target.view(torch.int16))
        if any(not torch.equal(results[0], result) for result in results[1:]):
            raise SystemExit(f"{lanes[0]} -> {lanes[1]}: loop and kernel copy different bytes")


def plain_copy(bench: Bench, device: torch.device) -> float:
    """Return the GB/s of one contiguous copy."""
    source = torch.zeros(PLAIN_BYTES // 8, dtype=torch.int64, device=device)
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)

    return PLAIN_BYTES / bench.median(copy).done_s / 1e9


def rows(
    bench: Bench, device: torch.device, layers: int, tokens: int
) -> list[tuple[tuple[int, int], dict[str, Took]]]:
    """Return the times of each pull by each way, by lanes."""
    memories = memory_of(device, layers, tokens), memory_of(device, layers, tokens)
    found = []
    for lanes in LANES:
        between = views(memories, layers, lanes)
        ways = {
            name: bench.median(lambda c=copier, p=between: pull(p, tokens, c))  # type: ignore[misc]
            for name, copier in copiers(device).items()
        }
        found.append((lanes, ways))
    return found


def shown(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    says = "" if row["way"] == "loop" else f"{row['ratio']:.1f} (bar {row['bar']:g})"
    return (
        f"{row['lanes']:>8} {row['tokens']:>7} {row['way']:>7} {row['took_s'] * 1e3:>9.3f} "
        f"{row['call_s'] * 1e3:>9.3f} "
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
    columns = f"{'way':>7} {'ms':>9} {'call ms':>9} {'us/token':>9} {'GB/s':>7}  ratio"
    print(f"{'lanes':>8} {'tokens':>7} {columns}")
    written = []
    for tokens in options.tokens:
        for lanes, ways in rows(bench, device, options.layers, tokens):
            copied_bytes = tokens * options.layers * HEADS // lanes[1] * 4 * HEAD_SIZE
            for way, took in ways.items():
                row = {
                    "lanes": f"{lanes[0]} -> {lanes[1]}",
                    "tokens": tokens,
                    "way": way,
                    "took_s": took.done_s,
                    "call_s": took.call_s,
                    "gb_s": copied_bytes / took.done_s / 1e9,
                    "ratio": ways["loop"].done_s / took.done_s,
                    "bar": bar(lanes, tokens),
                }
                print(shown(row), flush=True)
                written.append(row)
    if options.json:
        options.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
