"""KV of a request from one lane to another: each value names where it belongs."""

import math
from itertools import pairwise, product
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.memory.kv_view import KVView, heads_of
from harness.examples import examples
from tests.unit.memory.flat_memory import Kind, Memory, Model

SIZES = (1, 2, 4)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Any layout that vLLM makes; it cuts blocks only where a layer's blocks are side by side."""
    interleaved = draw(st.booleans())
    return Model(
        kv_heads=draw(st.sampled_from([1, 2, 4, 6, 8])),
        devices=draw(st.sampled_from([1, 2])),
        layers=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from([1, 2])),
        block_tokens=draw(st.sampled_from([2, 4])),
        kind=Kind(
            draw(st.booleans()), interleaved, 1 if interleaved else draw(st.sampled_from([1, 2]))
        ),
    )


def divides(model: Model, size: int) -> bool:
    """Whether a model can be cut for groups of this size."""
    degree = model.devices * size
    return model.kv_heads % degree == 0 or degree % model.kv_heads == 0


def check_copy(
    model: Model, lanes: tuple[int, int], ranks: tuple[int, int], tokens: range, seed: int
) -> None:
    """Copy what both ranks have: all of it, and in whole tiles, is then in the target and nothing
    else changes.
    """
    chance = Random(seed)
    counts = [-(-tokens.stop // model.tokens(size)) for size in lanes]
    blocks = [chance.sample(range(1, count + 4), count) for count in counts]
    source, target = (Memory(model, count + 4, seed + n) for n, count in enumerate(counts))
    source.write(lanes[0], ranks[0], blocks[0], range(counts[0] * model.tokens(lanes[0])))
    before = source.values.copy()
    heads = sorted(set(model.heads(lanes[0], ranks[0])) & set(model.heads(lanes[1], ranks[1])))
    tile = math.gcd(*(model.tokens(size) // source.cuts(size) for size in lanes))
    expected = target.values.copy()
    whole = range(tokens.start // tile * tile, -(-tokens.stop // tile) * tile)
    for at, value in target.places(lanes[1], ranks[1], blocks[1], whole, heads):
        expected[at] = value
    run = range(heads[0], heads[-1] + 1) if heads else range(0)
    target.view(lanes[1], ranks[1]).copy(
        source.view(lanes[0], ranks[0]), run, (blocks[0], blocks[1]), tokens
    )
    np.testing.assert_array_equal(target.values, expected)
    np.testing.assert_array_equal(source.values, before)


@settings(max_examples=examples(150), deadline=None)
@given(models(), st.data())
def test_any_tokens_are_copied_between_any_lanes(model: Model, data: st.DataObject) -> None:
    """However heads are split or replicate, tokens are unaligned, and blocks are cut for
    kernels.
    """
    sizes = [size for size in SIZES if divides(model, size)]
    lanes = data.draw(st.sampled_from(sizes)), data.draw(st.sampled_from(sizes))
    ranks = tuple(data.draw(st.integers(0, model.devices * size - 1)) for size in lanes)
    if not set(model.heads(lanes[0], ranks[0])) & set(model.heads(lanes[1], ranks[1])):
        ranks = 0, 0
    stop = data.draw(st.integers(1, 24))
    start = data.draw(st.integers(0, stop - 1))
    check_copy(
        model, lanes, (ranks[0], ranks[1]), range(start, stop), data.draw(st.integers(0, 1 << 16))
    )


@pytest.mark.parametrize(
    "kind", [Kind(), Kind(transposed=True), Kind(interleaved=True), Kind(cuts=4)], ids=str
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("lanes", list(product(SIZES, SIZES)), ids=str)
def test_every_pair_of_lanes(lanes: tuple[int, int], kv_heads: int, kind: Kind) -> None:
    """All ranks of one that share a head with one of the other; from a block's edge, and from
    within one.
    """
    model = Model(kv_heads, kind=kind, layers=2, head_size=1)
    for old, new in product(range(lanes[0]), range(lanes[1])):
        if set(model.heads(lanes[0], old)) & set(model.heads(lanes[1], new)):
            check_copy(
                model,
                lanes,
                (old, new),
                range(model.tokens(lanes[1]), model.tokens(lanes[1]) + 9),
                1,
            )
            check_copy(model, lanes, (old, new), range(5, 19), 2)


@pytest.mark.parametrize("lanes", list(product(SIZES, SIZES)), ids=str)
def test_blocks_before_the_first_token_are_not_written(lanes: tuple[int, int]) -> None:
    """They may be shared with other requests: where a cached prefix ends, what is copied begins."""
    model = Model(4)
    cached = 2 * model.tokens(lanes[1])
    stop = cached + 7
    source, target = Memory(model, 30, 1), Memory(model, 30, 2)
    old, new = list(range(1, 29)), list(range(28, 0, -1))
    source.write(lanes[0], 0, old, range(stop))
    before = target.values.copy()
    heads = range(max(1, 4 // max(lanes)))
    target.view(lanes[1], 0).copy(source.view(lanes[0], 0), heads, (old, new), range(cached, stop))
    for at, _ in target.places(lanes[1], 0, new, range(cached)):
        assert target.values[at] == before[at]
    assert all(
        target.values[at] == value
        for at, value in target.places(lanes[1], 0, new, range(cached, stop), list(heads))
    )


@pytest.mark.parametrize("cuts", [1, 2])
def test_blocks_of_a_view_are_zeroed_and_no_other(cuts: int) -> None:
    model = Model(4, kind=Kind(cuts=cuts))
    memory = Memory(model, 30, 1)
    memory.write(2, 0, list(range(1, 29)), range(28 * model.tokens(2)))
    before = memory.values.copy()
    memory.view(2, 0).zero([3, 7])
    zeroed = {at for at, _ in memory.places(2, 0, [3, 7], range(2 * model.tokens(2)))}
    assert zeroed
    assert all(
        (value == 0) == (at in zeroed or before[at] == 0) for at, value in enumerate(memory.values)
    )


def test_chunks_come_one_after_the_other() -> None:
    """As a request's KV is offered: what came before stays, wherever within a block a chunk
    ends.
    """
    model = Model(4, kind=Kind(transposed=True))
    source, target = Memory(model, 12, 1), Memory(model, 12, 2)
    old, new = [3, 8, 1, 7, 2, 4, 9, 5], [6, 2]
    source.write(1, 0, old, range(32))
    cuts = [0, 1, 6, 7, 20, 21, 31]
    for start, stop in pairwise(cuts):
        heads, tokens = range(1, 2), range(start, stop)
        target.view(4, 1).copy(source.view(1, 0), heads, (old, new), tokens)
        assert target.has(4, 1, new, range(stop))


def test_copy_of_no_tokens_copies_no_block() -> None:
    """Whatever the blocks are."""
    model = Model(2)
    memory = Memory(model, 5)
    before = memory.values.copy()
    memory.view(2, 0).copy(memory.view(1, 0), range(1), ([], []), range(4, 4))
    np.testing.assert_array_equal(memory.values, before)


# ---- all layers at once


@pytest.mark.parametrize("interleaved", [True, False])
def test_layers_at_equal_distances_are_one_tensor(interleaved: bool) -> None:
    """Keys and values each, if they are kept apart."""
    plain = Memory(Model(2, kind=Kind(interleaved=interleaved)), 5).view(2, 1)
    assert [tuple(stack.shape) for stack in plain.stacks] == [(3, 5, 1, 8, 4)]
    transposed = Memory(Model(2, kind=Kind(transposed=True, interleaved=interleaved)), 5).view(2, 1)
    assert [tuple(stack.shape) for stack in transposed.stacks] == [(3, 5, 1, 8, 2)] * 2
    for view, kinds in ((plain, 1), (transposed, 2)):
        for number, part in enumerate(view.parts):
            assert view.stacks[number % kinds][number // kinds].data_ptr() == part.data_ptr()
            assert torch.equal(view.stacks[number % kinds][number // kinds], part)


def layers(*parts: torch.Tensor) -> KVView:
    """A view of blocks of four tokens."""
    return KVView(parts, range(2), 4, 2)


@pytest.mark.parametrize("which", ["distances", "memories", "order"])
def test_other_layers_are_copied_each_by_itself(which: str) -> None:
    """If they lie at other distances, in several memories, or backwards; the other lane's may be
    alike.
    """
    page, blocks = 2 * 4 * 2, 3
    memory = torch.arange(20 * page * blocks)
    starts = {"distances": [0, 3, 7], "memories": [0, 3, 6], "order": [6, 3, 0]}[which]
    parts = [memory[s * page : (s + blocks) * page].view(blocks, 2, 4, 2) for s in starts]
    if which == "memories":
        parts[1] = torch.arange(page * blocks).neg().view(blocks, 2, 4, 2)
    source, target = layers(*parts), layers(*torch.zeros(3, blocks, 2, 4, 2, dtype=torch.long))
    assert [len(stack) for stack in source.stacks] == [1, 1, 1]
    assert [len(stack) for stack in target.stacks] == [3]
    target.copy(source, range(2), ([2, 1], [1, 2]), range(8))
    for old, new in zip(source.parts, target.parts, strict=True):
        assert torch.equal(new[[1, 2]], old[[2, 1]])
        assert not new[0].any()
    source.copy(target, range(1), ([1], [0]), range(3))
    for old, new in zip(target.parts, source.parts, strict=True):
        assert torch.equal(new[0, :1], old[1, :1])


# ---- views for peers


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint8]
)
def test_a_view_is_rebuilt_from_its_shape(dtype: torch.dtype) -> None:
    """Over the same bytes: of layers that begin anywhere in them."""
    memory = torch.arange(256, dtype=torch.int32).to(torch.int8)
    whole = memory.view(dtype)
    keys = whole[16:32].view(2, 2, 2, 2).transpose(2, 3)
    states = [whole[48:60].view(2, 2, 3)[:, :, 1:]]
    view = KVView([keys, whole[32:48].view(2, 2, 2, 2)], range(2, 4), 2, 4, states)
    found = KVView.over(memory, view.shape())
    assert found.heads == range(2, 4)
    assert found.block_tokens == 2
    pairs = zip([*found.parts, *found.states], [*view.parts, *view.states], strict=True)
    for part, mine in pairs:
        assert part.dtype == dtype
        assert part.shape == mine.shape
        assert part.stride() == mine.stride()
        assert part.data_ptr() == mine.data_ptr()


@pytest.mark.parametrize(("kv_heads", "degree"), [(8, 1), (8, 4), (2, 2), (2, 8), (1, 4)])
def test_heads_of_ranks(kv_heads: int, degree: int) -> None:
    """In order, each by as many ranks as there are for one."""
    found: list[Any] = [heads_of(rank, degree, kv_heads) for rank in range(degree)]
    told = [head for heads in found for head in heads]
    assert told == sorted(told)
    assert {head: told.count(head) for head in told} == {
        head: max(1, degree // kv_heads) for head in range(kv_heads)
    }
