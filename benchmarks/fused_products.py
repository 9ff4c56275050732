"""Time the four products of a decoder layer over a lane's views of the whole weights, and over
weights of the lane's own as stock vLLM has them.

python -m benchmarks.fused_products [--device cuda|cpu] [--dtype bfloat16|float32]
    [--models 8B 70B] [--degrees 1 2 4 8] [--tokens 1 16 256 2048] [--layers 1] [--scale 1]
    [--json FILE]

The products are q, k, v; gate and up; the attention's output; down. The views are the storage of
the project, cut for groups of up to eight engines, with the copy that puts q, k, v in order. Gate
and up are left by unit, as the activation reads them. The activation (silu, times up) is timed
apart.

Each time is the shortest of ROUNDS rounds, per layer. Stock's rounds and ours alternate. On a GPU
the calls are captured in a CUDA graph. `--layers` makes more copies of the weights, so that a cache
does not hold them; `--scale` divides the hidden and the inner size, for small machines.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import linear, silu

from flying_serving.layout.shards import Segment, segments_of
from flying_serving.weights.storage import SharedLinear, StridedColumns, StridedRows, rows_of
from flying_serving.weights.unit_order import keep_by_unit

WIDEST = 8
ROUNDS = 7
ROUND_S = 0.05
"""The least time of a round."""
MAX_CALLS = 50
PRODUCTS = ("qkv", "gate_up", "o", "down")
PARTS = (*PRODUCTS, "activation")
Run = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder layer."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    inner: int

    def scaled(self, scale: int) -> Shape:
        """Divide the hidden and the inner size, and the head's, by `scale`."""
        return Shape(
            self.hidden // scale, self.heads, self.kv_heads, self.head // scale, self.inner // scale
        )

    def columns(self) -> dict[str, tuple[Segment, ...]]:
        """Return the segments of the fused layers."""
        heads = (self.heads, self.kv_heads, self.kv_heads)
        return {
            "qkv": segments_of([count * self.head for count in heads], WIDEST, heads),
            "gate_up": segments_of([self.inner, self.inner], WIDEST),
        }

    def rows(self) -> dict[str, Segment]:
        """Return the one segment of each row-parallel layer."""
        return {"o": Segment(self.heads * self.head, WIDEST), "down": Segment(self.inner, WIDEST)}


SHAPES = {"8B": Shape(4096, 32, 8, 128, 14336), "70B": Shape(8192, 64, 8, 128, 28672)}


@dataclass(frozen=True)
class Columns:
    """A fused layer, kept by unit.

    Args:
        weight: as it was loaded, to cut stock's shards from.
    """

    weight: torch.Tensor
    segments: tuple[Segment, ...]
    storage: StridedColumns

    @classmethod
    def of(cls, weight: torch.Tensor, segments: tuple[Segment, ...]) -> Columns:
        """Keep a copy of a weight by unit."""
        kept = weight.clone()
        keep_by_unit(kept, segments)
        return cls(weight, segments, StridedColumns(kept, None, segments))

    def shard(self, rank: int, degree: int) -> torch.Tensor:
        """Return the weight that stock loads on this rank."""
        return torch.cat([self.weight[rows] for rows in rows_of(self.segments, rank, degree)])


@dataclass(frozen=True)
class Rows:
    """A row-parallel layer as it was loaded."""

    weight: torch.Tensor
    segment: Segment
    storage: SharedLinear

    @classmethod
    def of(cls, weight: torch.Tensor, segment: Segment) -> Rows:
        """Keep a weight as it is."""
        return cls(weight, segment, StridedRows(weight, None, segment))

    def shard(self, rank: int, degree: int) -> torch.Tensor:
        """Return the weight that stock loads on this rank."""
        (columns,) = rows_of([self.segment], rank, degree)
        return self.weight[:, columns].contiguous()


@dataclass(frozen=True)
class Layer:
    """The weights of a decoder layer."""

    columns: dict[str, Columns]
    rows: dict[str, Rows]

    @classmethod
    def draw(cls, shape: Shape, like: torch.Tensor) -> Layer:
        """Draw a layer's weights, of the type and on the device of `like`."""
        columns = {
            name: Columns.of(_numbers(like, _size(segments), shape.hidden), segments)
            for name, segments in shape.columns().items()
        }
        rows = {
            name: Rows.of(_numbers(like, shape.hidden, segment.size), segment)
            for name, segment in shape.rows().items()
        }
        return cls(columns, rows)


def _size(segments: Sequence[Segment]) -> int:
    return sum(segment.size for segment in segments)


def _numbers(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return like.new_empty(shape).uniform_(-1, 1).mul_(shape[-1] ** -0.5)


@dataclass(frozen=True)
class Pair:
    """A part of all layers as stock computes it, and as a lane does; the outputs are the same."""

    stock: list[Run]
    ours: list[Run]


def pairs(layers: Sequence[Layer], tokens: int, degree: int) -> dict[str, Pair]:
    """Return the parts of the last rank of `degree`."""
    rank = degree - 1
    found = {name: Pair([], []) for name in PARTS}
    for layer in layers:
        for name, columns in layer.columns.items():
            shard, storage = columns.shard(rank, degree), columns.storage
            by_unit = name == "gate_up"
            part = storage.part_by_unit(rank, degree) if by_unit else storage.part(rank, degree)
            x = _numbers(shard, tokens, shard.shape[1])
            found[name].stock.append(lambda x=x, shard=shard: linear(x, shard))
            found[name].ours.append(lambda x=x, part=part: part(x))
            if by_unit:
                plain, units = linear(x, shard), part(x)
                width = 2 * columns.segments[0].unit_size
                found["activation"].stock.append(lambda out=plain: gated(out))
                found["activation"].ours.append(
                    lambda out=units, width=width: gated(out.view(-1, width))
                )
        for name, rows in layer.rows.items():
            shard, part = rows.shard(rank, degree), rows.storage.part(rank, degree)
            x = _numbers(shard, tokens, shard.shape[1])
            found[name].stock.append(lambda x=x, shard=shard: linear(x, shard))
            found[name].ours.append(lambda x=x, part=part: part(x))
    return found


def gated(x: torch.Tensor) -> torch.Tensor:
    """Activate (tokens, 2 * d) to (tokens, d), on a GPU by vLLM's kernel if vLLM is installed."""
    half = x.shape[1] // 2
    if x.is_cuda and hasattr(torch.ops._C, "silu_and_mul"):
        out = x.new_empty(x.shape[0], half)
        torch.ops._C.silu_and_mul(out, x)
        return out
    return silu(x[:, :half]) * x[:, half:]


def difference(pair: Pair) -> float:
    """Return the largest difference of the first layer's sorted outputs, by the largest output."""
    stock, ours = (run().float().flatten().sort().values for run in (pair.stock[0], pair.ours[0]))
    return float((stock - ours).abs().max() / stock.abs().max())


def times_us(pair: Pair, device: str) -> tuple[float, float]:
    """Return the shortest round of stock's calls and of ours, per layer, in microseconds."""
    makes = _captured if device == "cuda" else _called
    rounds = [makes(runs) for runs in (pair.stock, pair.ours)]
    best = [math.inf, math.inf]
    for number in range(1 + ROUNDS):
        for which, round_us in enumerate(rounds):
            us = round_us()
            best[which] = min(best[which], us if number else math.inf)
    return best[0], best[1]


def _called(runs: Sequence[Run]) -> Callable[[], float]:
    """Return a round of calls, one after the other, which says how long a layer takes."""
    begin_s = time.perf_counter()
    for run in runs:
        run()
    calls = max(1, min(MAX_CALLS, int(ROUND_S / (time.perf_counter() - begin_s))))

    def round_us() -> float:
        begin_s = time.perf_counter()
        for _ in range(calls):
            for run in runs:
                run()
        return (time.perf_counter() - begin_s) / calls / len(runs) * 1e6

    return round_us


def _captured(runs: Sequence[Run]) -> Callable[[], float]:
    """Return a replay of a CUDA graph of the calls, which says how long a layer takes."""
    calls = max(1, MAX_CALLS // len(runs))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            for run in runs:
                run()

    def round_us() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / calls / len(runs) * 1e3

    return round_us


def ratio(times: dict[str, tuple[float, float]], parts: Sequence[str]) -> float:
    """Return the time of some parts, ours / stock."""
    stock, ours = (sum(times[part][which] for part in parts) for which in (0, 1))
    return ours / stock


def row(model: str, degree: int, tokens: int, times: dict[str, tuple[float, float]]) -> str:
    """Return a row of the table."""
    each = " | ".join(f"{stock:.1f}, {ours:.1f}" for stock, ours in times.values())
    whole = f"**{ratio(times, PRODUCTS):.2f}** | {ratio(times, PARTS):.2f}"
    return f"| {model} | {degree} | {tokens} | {each} | {whole} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--degrees", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 256, 2048])
    parser.add_argument("--layers", type=int, default=1, help="copies of the weights")
    parser.add_argument("--scale", type=int, default=1, help="divide the sizes by it")
    parser.add_argument("--json", type=Path, help="write the rows to a file too")
    args = parser.parse_args()

    if args.device == "cuda":
        with suppress(ImportError):  # torch and the project are enough
            importlib.import_module("vllm._custom_ops")
    torch.manual_seed(0)
    like = torch.empty(0, dtype=getattr(torch, args.dtype), device=args.device)
    device = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{device}, torch {torch.__version__}, {args.dtype}, sizes / {args.scale}")
    print("Microseconds per layer: stock, ours. The last two columns: ours / stock.\n")
    print(f"| model | degree | tokens | {' | '.join(PARTS)} | four products | with activation |")
    print("|" + "---|" * (5 + len(PARTS)))

    rows = []
    for model in args.models:
        layers = [Layer.draw(SHAPES[model].scaled(args.scale), like) for _ in range(args.layers)]
        for degree in args.degrees:
            for tokens in args.tokens:
                parts = pairs(layers, tokens, degree)
                times = {name: times_us(pair, args.device) for name, pair in parts.items()}
                apart = max(difference(pair) for pair in parts.values())
                print(row(model, degree, tokens, times), flush=True)
                rows.append(
                    {"model": model, "degree": degree, "tokens": tokens, "times_us": times}
                    | {"ratio": ratio(times, PRODUCTS), "difference": apart}
                )
    worst, apart = (max(one[key] for one in rows) for key in ("ratio", "difference"))
    print(f"\nWorst ratio of the four products: {worst:.2f}. Largest difference: {apart:.1e}.")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
