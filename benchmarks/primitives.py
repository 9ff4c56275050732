"""What oneDNN's primitives hold in a process of an engine on the CPU, ours and stock vLLM's.

oneDNN makes a primitive for each shape of a product, each number of tokens and each distance
between the rows of the input, and keeps up to 1,024 of them (ONEDNN_PRIMITIVE_CACHE_CAPACITY). So
an engine grows until it has computed steps of every number of tokens.

`python -m benchmarks.primitives` computes each product of the tiny model with 1 to 32 tokens, as
the soak has it: as stock vLLM does, as our lane 1 does, and as all lanes of an engine of four do.
Each is a process of its own. A lane has weights in units, and its input of a row-parallel product
is as wide as its own units: so each lane has primitives of its own for these products.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.server_watch import held_mib
from flying_lab.server_process import CPU_ENVIRONMENT
from flying_lab.signals import ended_by_signals
from flying_lab.tiny_models.checkpoint import SHAPES, Shape
from flying_serving.weights.lending.heap import give_back_freed

ROOT = Path(__file__).parents[1]
Product = tuple[int, int, int]
"""Outputs, inputs, and elements between the rows of the input."""
ENGINES, TOKENS, SHAPES_PER_MATRIX = 4, 32, 32
KINDS = {"stock vLLM": None, "lane 1": (1,), "all lanes": (1, 2, 4)}
FEW = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
"""vLLM itself keeps 32 primitives of each shape, which this does not change."""
COLUMNS = ("primitives", "resident", "of this in use", "free", "resident once freed is given back")


class MallocFigures(ctypes.Structure):
    """What glibc's `mallinfo2` returns: ten numbers, of which these two are named."""

    _fields_ = (
        ("others", ctypes.c_size_t * 7),
        ("in_use_bytes", ctypes.c_size_t),
        ("free_bytes", ctypes.c_size_t),
        ("trimmable_bytes", ctypes.c_size_t),
    )


def products(model: Shape, sizes: Sequence[int] | None) -> set[Product]:
    """The products of a Llama: those of stock vLLM if there are no `sizes`, else of the lanes of
    these sizes.
    """
    hidden, heads = model.hidden, model.heads * model.head_dim
    columns = heads + 2 * model.kv_heads * model.head_dim, 2 * model.intermediate, model.vocab
    rows = heads, model.intermediate
    if sizes is None:
        return {(size, hidden, hidden) for size in columns} | {
            (hidden, size, size) for size in rows
        }
    return {(size // ENGINES, hidden, hidden) for size in columns} | {
        (hidden, size // ENGINES, size // lane) for size in rows for lane in sizes
    }


def compute(asked: set[Product]) -> None:
    """Compute products with each number of tokens; their weights stay."""
    import torch
    from vllm import _custom_ops as ops

    handlers = {
        (outputs, inputs): ops.create_onednn_mm(torch.rand(outputs, inputs).t(), SHAPES_PER_MATRIX)
        for outputs, inputs, _ in asked
    }
    before = figures()
    for tokens in range(1, TOKENS + 1):
        for outputs, inputs, stride in sorted(asked):
            x, out = torch.zeros(tokens, stride)[:, :inputs], torch.empty(tokens, outputs)
            handler = handlers[outputs, inputs].handler_tensor
            torch.ops._C.onednn_mm(out, x, None, handler)
    resident, in_use, free = (now - then for now, then in zip(figures(), before, strict=True))
    give_back_freed()
    cells = (TOKENS * len(asked), resident, in_use, free, figures()[0] - before[0])
    print(" | ".join(f"{cell:.0f}" for cell in cells))


def figures() -> tuple[float, float, float]:
    """MiB of anonymous memory that is resident, that malloc has given out, and that is free in its
    heap.
    """
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = MallocFigures
    found = library.mallinfo2()
    return held_mib(os.getpid())["Anonymous"], found.in_use_bytes / 2**20, found.free_bytes / 2**20


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "kind", nargs="?", choices=KINDS, help="measure this one alone, in this process"
    )
    kind = parser.parse_args().kind
    if kind is not None:
        compute(products(SHAPES["llama"], KINDS[kind]))
        return
    print(f"| MiB | {' | '.join(COLUMNS)} |\n{'|---' * (1 + len(COLUMNS))}|")
    for each, variables in (*((each, {}) for each in KINDS), ("all lanes", FEW)):
        run = subprocess.run(
            [sys.executable, "-m", "benchmarks.primitives", each],
            cwd=ROOT,
            env=os.environ | CPU_ENVIRONMENT | variables,
            stdout=subprocess.PIPE,
            check=True,
        )
        setting = "".join(f", {name}={value}" for name, value in variables.items())
        print(f"| {each}{setting} | {run.stdout.decode().splitlines()[-1]} |", flush=True)


if __name__ == "__main__":
    with ended_by_signals():
        main()
