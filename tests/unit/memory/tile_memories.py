"""KV memory of random bytes in any layout and type, for copies whose results are compared as
bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from flying_serving.layout.shards import lane_block_tokens
from flying_serving.memory.kv_view import KVView, heads_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8)
BLOCKS = 7
"""Blocks of a device; block 0 is not a request's."""


@dataclass(frozen=True)
class Form:
    """How KV memory is laid out: `apart`: keys and values are two tensors of a layer; `transposed`:
    tokens of keys are in the last dimension; `heads_inside`: a token's heads lie side by side;
    `interleaved`: a block's layers do.
    """

    dtype: torch.dtype
    kv_heads: int
    layers: int
    head_size: int
    block_tokens: int
    apart: bool = False
    transposed: bool = False
    heads_inside: bool = False
    interleaved: bool = False

    def tokens(self, size: int) -> int:
        """Tokens in a block of a lane."""
        return lane_block_tokens(self.block_tokens, size, 1, self.kv_heads)


@dataclass(frozen=True)
class Pull:
    """Tokens of a request that go from a rank of a lane to a rank of another, and its blocks in
    both.
    """

    sizes: tuple[int, int]
    ranks: tuple[int, int]
    heads: range
    tokens: range
    blocks: tuple[Sequence[int], Sequence[int]]


def random_bytes(form: Form, seed: int) -> torch.Tensor:
    """Return the KV memory of a device (int8)."""
    row_bytes = 2 * form.head_size * form.dtype.itemsize
    size = form.layers * BLOCKS * form.block_tokens * form.kv_heads * row_bytes
    return torch.randint(-128, 128, (size,), generator=torch.Generator().manual_seed(seed)).to(
        torch.int8
    )


def view_of(form: Form, memory: torch.Tensor, size: int, rank: int) -> KVView:
    """Return a lane's view of memory."""
    heads, tokens, width = heads_of(rank, size, form.kv_heads), form.tokens(size), form.head_size
    page = len(heads) * tokens * 2 * width
    whole = memory.view(form.dtype)
    by_block, by_layer = (page * form.layers, page) if form.interleaved else (page, page * BLOCKS)
    parts = []
    for layer in range(form.layers):
        first = layer * by_layer
        if not form.apart:
            steps = (2 * width, len(heads) * 2 * width)
            by_head, by_token = steps if form.heads_inside else (tokens * 2 * width, 2 * width)
            shape = (BLOCKS, len(heads), tokens, 2 * width)
            parts.append(whole.as_strided(shape, (by_block, by_head, by_token, 1), first))
            continue
        half, by_head = page // 2, tokens * width
        shape = (BLOCKS, len(heads), tokens, width)
        steps = (1, tokens) if form.transposed else (width, 1)
        parts.append(whole.as_strided(shape, (by_block, by_head, *steps), first))
        parts.append(whole.as_strided(shape, (by_block, by_head, width, 1), first + half))
    return KVView(parts, heads, tokens, form.kv_heads)


@st.composite
def forms(draw: st.DrawFn) -> Form:
    """Draw any layout: rows of whole words of eight bytes, and others."""
    apart = draw(st.booleans())
    return Form(
        draw(st.sampled_from(DTYPES)),
        kv_heads=draw(st.sampled_from([1, 2, 4, 8])),
        layers=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from([1, 3, 4, 8])),
        block_tokens=draw(st.sampled_from([2, 3, 4, 20])),
        apart=apart,
        transposed=apart and draw(st.booleans()),
        heads_inside=not apart and draw(st.booleans()),
        interleaved=draw(st.booleans()),
    )


@st.composite
def pulls(draw: st.DrawFn, form: Form) -> Pull:
    """Draw a pull between any two lanes that share a head."""
    sizes = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4]))
    target_rank = draw(st.integers(0, sizes[1] - 1))
    needed = heads_of(target_rank, sizes[1], form.kv_heads)
    sources = [set(heads_of(rank, sizes[0], form.kv_heads)) for rank in range(sizes[0])]
    source_rank = draw(st.sampled_from([r for r, has in enumerate(sources) if has & set(needed)]))
    shared = sorted(sources[source_rank] & set(needed))
    most = min(form.tokens(size) for size in sizes) * (BLOCKS - 1)
    stop = draw(st.integers(1, min(most, 40)))
    start = draw(st.integers(0, stop - 1))
    blocks = [draw(st.permutations(range(1, BLOCKS))) for _ in sizes]
    return Pull(
        sizes,
        (source_rank, target_rank),
        range(shared[0], shared[-1] + 1),
        range(start, stop),
        (blocks[0], blocks[1]),
    )
