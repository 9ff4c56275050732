"""KV of several requests from one lane to another, all ranks at once: each value names where it belongs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from flying_serving.layout.groups import Group, aligned_group, enclosing_group
from flying_serving.layout.shards import lane_block_tokens
from flying_serving.memory.kv_view import KVView, heads_of
from flying_serving.migration import transfer
from flying_serving.migration.transfer import copy_kv
from tests.migration.ranks import Communicators, Ranks

ENGINES = 4
SIZES = (1, 2, 4)


@dataclass(frozen=True)
class Kind:
    """How an engine's KV memory is laid out.

    Args:
        transposed: tokens of keys are in the last dimension, as in vLLM's CPU kernels.
        interleaved: a block's layers lie side by side; else a layer's blocks do.
        cuts: into how many kernel blocks a block is cut.
    """

    transposed: bool = False
    interleaved: bool = False
    cuts: int = 1


@dataclass(frozen=True)
class Case:
    """Requests, each with so many tokens of which a range moves, from `old` to `new`."""

    old: Group
    new: Group
    engines: Group
    devices: int
    kv_heads: int
    block_tokens: int
    layers: int
    head_size: int
    kind: Kind
    requests: Sequence[tuple[int, range]]
    seed: int

    @property
    def count(self) -> int:
        """Tokens that move."""
        return sum(len(tokens) for _, tokens in self.requests)

    def tokens_in_block(self, group: Group) -> int:
        """Tokens in a block of a group's lane."""
        return lane_block_tokens(self.block_tokens, len(group), self.devices, self.kv_heads)

    def heads(self, group: Group, engine: int, device: int) -> list[int]:
        """Heads that a rank of a group has, by going through all of them."""
        degree, rank = self.devices * len(group), device * len(group) + group.index(engine)
        if self.kv_heads < degree:
            return [rank * self.kv_heads // degree]
        return [head for head in range(self.kv_heads) if head * degree // self.kv_heads == rank]

    def value(self, layer: int, request: int, token: int, head: int, component: int) -> int:
        """What is kept of a token: nothing else is the same."""
        return 1 + ((((layer * 8 + request) * 64 + token) * 8 + head) * 2 * self.head_size) + component


class Engine:
    """An engine's block tables in both lanes: none of its blocks is in two places."""

    def __init__(self, case: Case, chance: Random) -> None:
        counts = [-(-most // case.tokens_in_block(g)) for g in (case.old, case.new) for most, _ in case.requests]
        self.blocks = 2 + sum(counts)
        free = chance.sample(range(1, self.blocks), sum(counts))
        tables = [[free.pop() for _ in range(count)] for count in counts]
        self.old, self.new = tables[: len(case.requests)], tables[len(case.requests) :]


class Memory:
    """A device's KV memory, and where in it each token's values are: by hand, as numbers of a flat array."""

    def __init__(self, case: Case, engine: Engine, chance: Random) -> None:
        self.case, self.engine = case, engine
        self.page = case.tokens_in_block((0,)) * max(1, case.kv_heads // case.devices) * 2 * case.head_size
        size = case.layers * engine.blocks * self.page
        self.values = -np.random.default_rng(chance.randrange(1 << 30)).integers(1, 1 << 30, size)

    def lane(self, group: Group, heads: range) -> KVView:
        """The lane's cache, made of views as vLLM makes them."""
        case, tokens = self.case, self.case.tokens_in_block(group)
        cuts = case.kind.cuts
        inner, width = tokens // cuts, 2 * case.head_size
        parts = []
        for layer in range(case.layers):
            strides = (self.block_stride // cuts, inner * width, width, 1)
            shape = (self.engine.blocks * cuts, len(heads), inner, width)
            view = torch.from_numpy(self.values).as_strided(shape, strides, layer * self.layer_stride)
            parts += self._transposed(view) if case.kind.transposed else [view]
        return KVView(parts, heads, tokens)

    @staticmethod
    def _transposed(cache: torch.Tensor) -> list[torch.Tensor]:
        blocks, heads, tokens, width = cache.shape
        half, (by_block, by_head, _, _) = width // 2, cache.stride()
        keys = cache.as_strided((blocks, heads, tokens, half), (by_block, by_head, 1, tokens))
        start = cache.storage_offset() + tokens * half
        return [keys, cache.as_strided((blocks, heads, tokens, half), (by_block, by_head, half, 1), start)]

    @property
    def block_stride(self) -> int:
        """From a block of a layer to the next."""
        return self.page * self.case.layers if self.case.kind.interleaved else self.page

    @property
    def layer_stride(self) -> int:
        """From a layer of a block to the next."""
        return self.page if self.case.kind.interleaved else self.page * self.engine.blocks

    def write(
        self, values: np.ndarray, group: Group, heads: list[int], table: list[list[int]], *, all_of: bool
    ) -> None:
        """Put what belongs to these heads of the tokens that move, or of all, into an array like this memory."""
        case = self.case
        for number, (most, copied) in enumerate(case.requests):
            for token in range(most) if all_of else copied:
                for layer, (n, head), part in product(range(case.layers), enumerate(heads), range(2 * case.head_size)):
                    block, place = divmod(token, case.tokens_in_block(group))
                    at = layer * self.layer_stride + table[number][block] * self.block_stride
                    at += self._in_page(place, case.tokens_in_block(group), n, len(heads), part)
                    values[at] = case.value(layer, number, token, head, part)

    def _in_page(self, place: int, tokens: int, head: int, heads: int, part: int) -> int:
        size, inner = self.case.head_size, tokens // self.case.kind.cuts
        cut, n = divmod(place, inner)
        start = (cut * heads + head) * inner * 2 * size
        if not self.case.kind.transposed:
            return start + n * 2 * size + part
        return start + (part * inner + n if part < size else (inner + n) * size + part - size)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any two groups of four engines and any group that holds both, and requests that move from some token on."""
    old, new = (aligned_group(draw(st.integers(0, 3)), draw(st.sampled_from(SIZES))) for _ in range(2))
    smallest = enclosing_group(old, new, SIZES)
    assert smallest is not None
    engines = draw(st.sampled_from([smallest, aligned_group(0, ENGINES)]))
    requests = []
    for _ in range(draw(st.integers(1, 3))):
        most = draw(st.integers(1, 24))
        start = draw(st.integers(0, most - 1))
        requests.append((most, range(start, draw(st.integers(start + 1, most)))))
    interleaved = draw(st.booleans())
    return Case(
        old,
        new,
        engines,
        devices=draw(st.sampled_from([1, 2])),
        kv_heads=draw(st.sampled_from([1, 2, 4, 8])),
        block_tokens=draw(st.sampled_from([2, 4])),
        layers=draw(st.integers(1, 3)),
        head_size=draw(st.sampled_from([1, 2])),
        # vLLM cuts blocks only where a layer's blocks are side by side
        kind=Kind(draw(st.booleans()), interleaved, 1 if interleaved else draw(st.sampled_from([1, 2]))),
        requests=requests,
        seed=draw(st.integers(0, 1 << 20)),
    )


def ranks_of(group: Group, devices: int) -> Iterator[tuple[int, int, int]]:
    """Engine, device and rank of each of a group's devices, by rank."""
    for rank, (device, engine) in enumerate(product(range(devices), group)):
        yield engine, device, rank


def run(case: Case) -> Ranks:
    """Copy on all ranks of the group; check what all of them have then. Returns what was sent."""
    chance = Random(case.seed)
    engines = {engine: Engine(case, chance) for engine in case.engines}
    ranks = list(ranks_of(case.engines, case.devices))
    memories, expected = [], []
    for engine, device, _ in ranks:
        memory, tables = Memory(case, engines[engine], chance), engines[engine]
        if engine in case.old:
            memory.write(memory.values, case.old, case.heads(case.old, engine, device), tables.old, all_of=True)
        after = memory.values.copy()
        if engine in case.new:
            memory.write(after, case.new, case.heads(case.new, engine, device), tables.new, all_of=False)
        memories.append(memory)
        expected.append(after)
    together = Ranks(len(ranks))

    def one(rank: int) -> None:
        engine, device, _ = ranks[rank]
        tables, ranges = engines[engine], [tokens for _, tokens in case.requests]
        views = {}
        for size in {len(case.old), len(case.new)}:
            heads = heads_of(device * size + engine % size, case.devices * size, case.kv_heads)
            views[size] = memories[rank].lane(aligned_group(engine, size), heads)
        worker: Any = SimpleNamespace(
            engine=engine,
            device=device,
            devices=case.devices,
            kv_heads=case.kv_heads,
            kv_views=views,
            communicators=Communicators({case.engines: together}, engine, device),
        )
        old = list(zip(tables.old, ranges, strict=True)) if engine in case.old else None
        new = list(zip(tables.new, ranges, strict=True)) if engine in case.new else None
        copy_kv(worker, case.engines, (case.old, old), (case.new, new), case.count)

    together.run(one)
    for memory, after in zip(memories, expected, strict=True):
        np.testing.assert_array_equal(memory.values, after)
    return together


@settings(max_examples=150)
@given(cases(), st.sampled_from([1, 100, 1 << 20]))
def test_new_ranks_get_the_kv_of_their_heads_and_nothing_else_changes(case: Case, piece_bytes: int) -> None:
    """Of every pair of groups, however KV heads are split or replicate; each head is told once."""
    event(f"{len(case.old)} -> {len(case.new)} engines")
    with patch.object(transfer, "PIECE_BYTES", piece_bytes):
        sent = run(case).sent
    parts = case.layers * (2 if case.kind.transposed else 1)
    width = case.head_size * (1 if case.kind.transposed else 2)
    assert sum(shape[0] * shape[2] for _, shape in sent) == parts * case.kv_heads
    assert {shape[1::2] for _, shape in sent} == {(case.count, width)}


def case(kv_heads: int = 4, old: Group = (0, 1, 2, 3), new: Group = (2,), kind: Kind | None = None) -> Case:
    """A case of two requests and three layers."""
    requests = [(21, range(5, 20)), (9, range(9))]
    return Case(old, new, (0, 1, 2, 3), 1, kv_heads, 4, 3, 2, kind or Kind(), requests, 7)


@pytest.mark.parametrize(
    ("kv_heads", "senders"), [(1, [0]), (2, [0, 2]), (4, [0, 1, 2, 3]), (8, [0, 1, 2, 3])], ids=str
)
def test_who_has_only_heads_that_were_told_is_not_asked(kv_heads: int, senders: list[int]) -> None:
    """Where KV heads replicate, one of the ranks that share them is enough."""
    assert [rank for rank, _ in run(case(kv_heads)).sent] == senders


@pytest.mark.parametrize(("layers_in_a_piece", "pieces"), [(0, [1, 1, 1]), (1, [1, 1, 1]), (2, [2, 1]), (3, [3])])
def test_a_large_copy_goes_in_pieces(layers_in_a_piece: int, pieces: list[int]) -> None:
    """At least a layer at a time, from each sender."""
    copied = case(kv_heads=2, old=(0,), new=(0, 1))
    layer_bytes = copied.count * 2 * 2 * copied.head_size * 8
    for piece_bytes in (layers_in_a_piece * layer_bytes, (layers_in_a_piece + 1) * layer_bytes - 1):
        with patch.object(transfer, "PIECE_BYTES", piece_bytes):
            assert [shape[0] for _, shape in run(copied).sent] == pieces


@pytest.mark.parametrize("transposed", [False, True])
def test_slot_mapping_where_kernels_see_smaller_blocks(transposed: bool) -> None:
    """A lane's block of 16 tokens is cut into four of the kernels."""
    run(case(kind=Kind(transposed, cuts=4)))
    run(case(kind=Kind(transposed, cuts=4), old=(2,), new=(0, 1, 2, 3)))


def test_slot_mapping_of_tokens() -> None:
    """From the blocks of each request, in order, and none of a request of which none is meant."""
    view = KVView([torch.zeros(9, 1, 2, 1)], range(1), 4)
    assert view.slot_mapping([([3, 1, 2], range(3, 9)), ([5], range(2, 2)), ([8], range(2))]).tolist() == [
        15, 4, 5, 6, 7, 8, 32, 33,
    ]  # fmt: skip
    assert view.slot_mapping([]).tolist() == []


def test_heads_of_others_are_not_kept() -> None:
    """A lane takes of what is told only what it works with: all, some, or none of it."""
    for told, kept in ((range(4), [2, 3]), (range(3, 4), [3]), (range(2), []), (range(2, 8), [2, 3])):
        cache = KVView([torch.full((2, 2, 1, 1), -1)], range(2, 4), 1)
        cache.write(0, torch.tensor([1]), told, torch.tensor([[[head] for head in told]]))
        after = cache.parts[0]
        assert after[0].flatten().tolist() == [-1, -1]
        assert after[1].flatten().tolist() == [head if head in kept else -1 for head in (2, 3)]
