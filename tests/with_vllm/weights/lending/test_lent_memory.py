"""Weights and KV of a device that take pages from each other, over a driver without spare pages."""

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from flying_serving.layout.shards import Segment, segments_of
from flying_serving.memory.cuda_arena import CudaArena
from flying_serving.weights.lending.device_pages import DevicePages
from flying_serving.weights.lending.ledger import ExtraKV, PageLedger
from flying_serving.weights.lending.lent_memory import ExtraBlocks, extents, own_blocks_of
from flying_serving.weights.lending.residency import WorkerWeights
from flying_serving.weights.lending.weight_file import WeightFile
from flying_serving.weights.unit_order import UnitOrder
from flying_serving.weights.units import RawUnits
from harness.examples import examples
from tests.unit.memory.fake_cuda import PAGE, FakeDriver, fake_device

WIDEST = 4


Kinds = list[tuple[int, int]]
"""Kinds of layers: how many there are, and the bytes of a block in each."""


def bytes_of_block(kinds: Kinds) -> int:
    """Of all layers."""
    return sum(layers * page_bytes for layers, page_bytes in kinds)


def kv_config(kinds: Kinds, blocks: int, together: bool) -> KVCacheConfig:
    """KV of layers, each with a region of its own, or `together` in each block."""
    offset, tensors = 0, []
    for number, (layers, page_bytes) in enumerate(kinds):
        strides = (
            (page_bytes, bytes_of_block(kinds)) if together else (blocks * page_bytes, page_bytes)
        )
        names = [f"{number}.{layer}" for layer in range(layers)]
        size_bytes = blocks * bytes_of_block(kinds)
        tensors.append(KVCacheTensor(size_bytes, names, *strides, offset=offset))
        offset += layers * strides[0]
    return KVCacheConfig(blocks, tensors, [])


class Device(RuleBasedStateMachine):
    """A device whose weights go and come back as in `weights/lending/engine_weights.py`.

    It has as many pages as its weights and its own blocks need. `extra`: numbers that were written
    into extra blocks, by block.
    """

    @initialize(
        rank=st.integers(0, WIDEST - 1),
        rows=st.lists(st.integers(1, 9), min_size=1, max_size=4),
        kinds=st.lists(
            st.tuples(
                st.integers(1, 3), st.sampled_from([PAGE // 8, PAGE // 2, 3 * PAGE // 4, 2 * PAGE])
            ),
            min_size=1,
            max_size=2,
        ),
        own=st.integers(2, 9),
        together=st.booleans(),
    )
    def start(self, rank: int, rows: list[int], kinds: Kinds, own: int, together: bool) -> None:
        self.driver = FakeDriver(pages=10_000)
        self._place(rank, rows)
        block_bytes = bytes_of_block(kinds)
        blocks = own + sum(self.residency.piece_bytes(WIDEST)) // block_bytes
        self.kv = kv_config(kinds, blocks, together)
        self.own = own_blocks_of(self.kv, own * block_bytes)
        self.memory = CudaArena(fake_device(self.driver), blocks * block_bytes)
        for extent in extents(self.kv, range(self.own)):
            self.memory.back(*extent)
        tensor = self.memory.tensor(0, self.memory.size_bytes)
        self.kv_bytes = tensor
        self.blocks = ExtraBlocks(tensor, self.kv, self.memory, [])
        regions = extents(self.kv, range(1))
        extra = ExtraKV(blocks - self.own, [size for _, size in regions])
        self.ledger = PageLedger(self.residency.piece_bytes(WIDEST), extra, PAGE)
        self.contents = {block: block + 1 for block in range(self.own)}
        for block in range(self.own):
            self._write(block)
        self.driver.pages = self.driver.used_bytes // PAGE

    def _place(self, rank: int, rows: list[int]) -> None:
        self.file = WeightFile(tempfile.gettempdir(), tempfile.gettempdir(), 0, writes=True)
        self.weights = CudaArena(fake_device(self.driver), 200 * PAGE)
        pages = DevicePages(self.weights, self.file, torch.empty(3 * PAGE, dtype=torch.int8))
        self.placed: list[tuple[torch.Tensor, torch.Tensor]] = []
        pieces = []
        for number, count in enumerate(rows):
            segments: tuple[Segment, ...] = segments_of([4 * count, 8 * count], WIDEST)
            weight = torch.randint(-99, 99, (12 * count, 999), dtype=torch.int8)
            order = UnitOrder(segments)
            placed = pages.place(weight, order.rows_of(rank, WIDEST).runs)
            self.placed.append((placed, weight))
            units = RawUnits.of_rows(placed, segments, pages, order.rows_of_units())
            pieces.append((str(number), units))
        (self.kept,) = UnitOrder(segments_of([4, 8], WIDEST)).rows_of(rank, WIDEST).runs
        self.residency = WorkerWeights(pieces, rank)

    def _write(self, block: int) -> None:
        for first, size in extents(self.kv, range(block, block + 1)):
            self.kv_bytes[first : first + size] = self.contents[block]

    @rule(lends=st.booleans())
    def lend_or_fetch(self, lends: bool) -> None:
        if lends and self.ledger.dropped < self.ledger.pieces:
            self._lend_piece()
        elif self.ledger.dropped:
            self._fetch_piece()

    def _lend_piece(self) -> None:
        self.ledger.drop()
        new = self.ledger.back()
        extra = range(self.own + new.start, self.own + new.stop)
        self.residency.drop_next(WIDEST)
        self.blocks.back(extra)
        for block in extra:
            self.contents[block] = block % 100
            self._write(block)

    def _fetch_piece(self) -> None:
        gone = self.ledger.release(self.ledger.room(self.ledger.dropped - 1))
        self.blocks.release(range(self.own + gone.start, self.kv.num_blocks))
        for block in gone:
            del self.contents[self.own + block]
        self.ledger.fetch()
        self.residency.fetch_next()

    @invariant()
    def blocks_have_their_contents(self) -> None:
        for block, number in self.contents.items():
            for first, size in extents(self.kv, range(block, block + 1)):
                content = self.kv_bytes[first : first + size]
                assert (int(content.min()), int(content.max())) == (number, number)

    @invariant()
    def weights_are_whole_when_all_are_back(self) -> None:
        for placed, weight in self.placed:
            if not self.ledger.dropped:
                assert torch.equal(placed, weight)
            count = len(weight) // 12
            rows = slice(self.kept.start * count, self.kept.stop * count)
            assert torch.equal(placed[rows], weight[rows])

    @invariant()
    def pages_have_one_owner(self) -> None:
        self.ledger.check()

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.memory.close()
            self.weights.close()
            self.file.close()
            assert self.driver.leaves_nothing


TestDevice = settings(max_examples=examples(60), stateful_step_count=12)(Device).TestCase


@pytest.mark.parametrize("together", [False, True])
def test_blocks_without_lent_weights_have_no_extra_page(together: bool) -> None:
    kv = kv_config([(3, PAGE)], 20, together)
    assert own_blocks_of(kv, 7 * 3 * PAGE) == 7
    driver = FakeDriver()
    arena = CudaArena(fake_device(driver), 60 * PAGE)
    for extent in extents(kv, range(7)):
        arena.back(*extent)
    assert arena.backed_bytes == 21 * PAGE
    assert len(driver.mapped) == (1 if together else 3)


class Requests:
    """A lane that has been told of other blocks."""

    def __init__(self) -> None:
        self.replaced: Any = None

    def replace_blocks(self, copies: Any) -> None:
        self.replaced = copies


@pytest.mark.parametrize("kinds", [[(3, 64)], [(2, 64), (1, 32)], [(1, 32), (2, 64)]], ids=str)
@pytest.mark.parametrize("together", [False, True])
def test_block_is_copied_in_all_layers(together: bool, kinds: Kinds) -> None:
    kv = kv_config(kinds, 20, together)
    arena = CudaArena(fake_device(), 20 * bytes_of_block(kinds))
    arena.back(0, arena.size_bytes)
    memory, lane = arena.tensor(0, arena.size_bytes), Requests()
    for first, size in extents(kv, range(12, 13)):
        memory[first : first + size] = 7
    lanes: Any = [lane]
    ExtraBlocks(memory, kv, arena, lanes).copy({12: 5})
    assert all(bool((memory[f : f + s] == 7).all()) for f, s in extents(kv, range(5, 6)))
    assert int(memory.sum()) == 2 * bytes_of_block(kinds) * 7
    assert lane.replaced == {12: 5}
