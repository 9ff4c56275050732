"""Units that are dropped and fetched back: the same bits, and never a product of what is not
there.
"""

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.errors import IntegrityError, WeightFileError
from flying_serving.layout.shards import Segment, segments_of
from flying_serving.weights.lending.weight_file import WeightFile
from flying_serving.weights.storage import PackedColumns
from flying_serving.weights.units import Product, RawUnits, rows_of_units, units_of
from harness.examples import examples
from tests.unit.memory.layers import DEGREES, LENDING, Lending, plain_pack, weight_file

PAGE = mmap.PAGESIZE


@dataclass
class Layer:
    """A layer in real numbers, whose sums depend on their order, and the inputs of each rank."""

    kind: str
    weight: torch.Tensor
    bias: torch.Tensor | None
    segments: tuple[Segment, ...]
    x: torch.Tensor
    widest: int

    def storage(self) -> Lending:
        return LENDING[self.kind](self.weight, self.bias, self.segments)

    def lanes(self) -> Iterator[tuple[int, int]]:
        """Yield (rank, degree) of all lanes."""
        yield from (
            (rank, degree) for degree in DEGREES if degree <= self.widest for rank in range(degree)
        )

    def input(self, rank: int, degree: int) -> torch.Tensor:
        """What a rank multiplies with: of rows, its part of the inputs."""
        if not self.kind.endswith("rows"):
            return self.x
        width = self.x.shape[-1] // degree
        return self.x[..., rank * width : (rank + 1) * width]

    def needed(self, rank: int, degree: int) -> set[tuple[int, int]]:
        return units_of(self.segments, rank, degree)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    """Draw a layer with or without heads that ranks share, whose units are parts of a page or
    several pages.
    """
    kind = draw(st.sampled_from(sorted(LENDING)))
    widest = draw(st.sampled_from([2, 4, 8]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    wide = draw(st.sampled_from([3, 700, 1024]))
    if kind.endswith("rows"):
        segments = segments_of([widest * draw(st.sampled_from([1, 5]))], widest)
        weight = torch.randn(wide, segments[0].size, generator=generator)
    else:
        heads = draw(st.none() | st.lists(st.sampled_from([1, 2, 8]), min_size=1, max_size=3))
        sizes = [8 * 3] if heads is None else [count * 3 for count in heads]
        segments = segments_of(sizes, widest, heads)
        weight = torch.randn(sum(sizes), wide, generator=generator)
    bias = torch.randn(weight.shape[0], generator=generator) if draw(st.booleans()) else None
    return Layer(
        kind, weight, bias, segments, torch.randn(2, weight.shape[1], generator=generator), widest
    )


@settings(max_examples=examples(100))
@given(layer=layers(), data=st.data())
def test_a_kept_rank_has_the_same_bits_and_all_have_them_back(
    layer: Layer, data: st.DataObject
) -> None:
    """Products that were handed out before; who needs a dropped unit raises, and is whole again
    after the fetch.
    """
    storage = layer.storage()
    products = {lane: storage.part(*lane) for lane in layer.lanes()}
    before = {lane: product(layer.input(*lane)) for lane, product in products.items()}
    for kept in data.draw(
        st.lists(st.sampled_from([lane for lane in layer.lanes() if lane[1] > 1]), max_size=2)
    ):
        freed_bytes = storage.units.drop(*kept)
        assert freed_bytes == storage.units.lendable(*kept)
        assert storage.units.drop(*kept) == 0
        for lane, product in products.items():
            if layer.needed(*lane) <= layer.needed(*kept):
                assert torch.equal(product(layer.input(*lane)), before[lane])
            else:
                with pytest.raises(IntegrityError, match="lent to the KV cache"):
                    product(layer.input(*lane))
        assert storage.units.fetch() == freed_bytes
        assert storage.units.fetch() == 0
        for lane, product in products.items():
            assert torch.equal(product(layer.input(*lane)), before[lane])


@settings(max_examples=examples(50))
@given(layer=layers(), data=st.data())
def test_second_drop_leaves_the_units_of_both_ranks(layer: Layer, data: st.DataObject) -> None:
    storage = layer.storage()
    lanes = [lane for lane in layer.lanes() if lane[1] > 1]
    first, second = data.draw(st.sampled_from(lanes)), data.draw(st.sampled_from(lanes))
    freed_bytes = storage.units.drop(*first) + storage.units.drop(*second)
    for lane in layer.lanes():
        product = storage.part(*lane)
        if layer.needed(*lane) <= layer.needed(*first) & layer.needed(*second):
            product(layer.input(*lane))
        else:
            with pytest.raises(IntegrityError):
                product(layer.input(*lane))
    assert storage.units.fetch() == freed_bytes


@pytest.mark.parametrize(
    "heads", [(8, 8, 8), (8, 2, 2), (8, 1, 1)], ids=["all", "grouped", "one KV head"]
)
@pytest.mark.parametrize("degree", [2, 4, 8])
def test_packed_bytes_are_held_by_other_ranks(heads: tuple[int, ...], degree: int) -> None:
    """Shared KV heads stay with each rank that reads them."""
    segments = segments_of([4 * count for count in heads], 8, heads)
    weight = torch.zeros(4 * sum(heads), 10)
    storage = PackedColumns(weight, None, segments, plain_pack, weight_file())
    kept_rows = [4 * max(1, count // degree) for count in heads]
    for rank in range(degree):
        assert storage.units.lendable(rank, degree) == 40 * (weight.shape[0] - sum(kept_rows))
    assert storage.units.lendable(0, 1) == 0


class Handler:
    """What a library has packed, counted while it exists."""

    alive = 0

    def __init__(self) -> None:
        Handler.alive += 1

    def __del__(self) -> None:
        Handler.alive -= 1


def handled(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    handler, product = Handler(), plain_pack(weight, bias)

    def multiply(x: torch.Tensor, out: torch.Tensor) -> None:
        assert handler
        product(x, out)

    return multiply


def test_dropped_memory_has_no_references() -> None:
    """A library's memory is released with its handler, though lanes hold on to their products."""
    storage = PackedColumns(
        torch.zeros(16, 4), None, segments_of([8, 8], 8), handled, weight_file()
    )
    products = [storage.part(rank, degree) for degree in (1, 2, 8) for rank in range(degree)]
    assert Handler.alive == 8
    storage.units.drop(1, 4)
    assert Handler.alive == 2
    storage.units.fetch()
    assert Handler.alive == 8
    assert all(product(torch.zeros(1, 4)).sum() == 0 for product in products)


def test_pages_are_given_back_but_for_those_that_a_kept_unit_shares() -> None:
    """Units of one and a half pages; the kept one lies in the third to the fifth half."""
    units = 6
    weight = torch.ones(units, 3 * PAGE // 8)
    segment = Segment(units, units)
    raw = RawUnits.of_rows(weight, [segment], weight_file())
    before_pages = (-weight.data_ptr() % PAGE) // 4  # numbers before the first whole page
    freed_bytes = raw.drop(1, units)
    kept = torch.zeros(units, 3 * PAGE // 8, dtype=torch.bool)
    kept[1] = True
    assert bool((weight[kept] == 1).all())
    gone = (weight == 0).flatten()
    assert freed_bytes == 4 * int(gone.sum())
    assert freed_bytes % PAGE == 0
    assert weight.numel() * 4 - 3 * PAGE // 2 - freed_bytes < 4 * PAGE
    assert not gone[:before_pages].any()
    raw.fetch()
    assert bool((weight == 1).all())


def test_weights_that_no_file_has_are_never_dropped() -> None:
    weight, segments = torch.ones(8, 2), (Segment(8, 8),)
    storage, raw = (
        PackedColumns(weight, None, segments, plain_pack),
        RawUnits.of_rows(weight, segments, None),
    )
    for units in (storage.units, raw):
        with pytest.raises(IntegrityError, match="could not be fetched back"):
            units.drop(0, 2)
    raw.guard(0, 1)()
    assert torch.equal(storage.part(0, 1)(torch.ones(1, 2)), torch.full((1, 8), 2.0))


@pytest.mark.parametrize("kind", sorted(LENDING))
def test_failed_fetch_leaves_units_dropped(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next one succeeds."""
    layer = Layer(kind, torch.randn(1024, 1024), None, (Segment(1024, 4),), torch.randn(1, 1024), 4)
    storage = layer.storage()
    product = storage.part(0, 1)
    before = product(layer.x)
    freed_bytes = storage.units.drop(1, 4)
    with monkeypatch.context() as patch:
        patch.setattr(WeightFile, "read_at", _fails)
        with pytest.raises(WeightFileError):
            storage.units.fetch()
    with pytest.raises(IntegrityError):
        product(layer.x)
    assert storage.units.fetch() == freed_bytes
    assert torch.equal(product(layer.x), before)


def _fails(*_: object) -> None:
    raise WeightFileError("weights of engine 0 device 0: Input/output error")


def test_rows_of_units() -> None:
    """One segment after the other."""
    found = rows_of_units((Segment(4, 2), Segment(3, 1)))
    assert found == {(0, 0): slice(0, 2), (0, 1): slice(2, 4), (1, 0): slice(4, 7)}


Check = Callable[[], None]


def test_guard_follows_dropped_units() -> None:
    """For whoever reads the tensors themselves, such as an embedding."""
    raw = RawUnits.of_rows(torch.zeros(8, 2), [Segment(8, 8)], weight_file())
    checks: dict[tuple[int, int], Check] = {
        (r, d): raw.guard(r, d) for d in (1, 2, 4) for r in range(d)
    }
    raw.drop(3, 4)
    checks[3, 4]()
    for lane in ((0, 1), (1, 2), (2, 4)):
        with pytest.raises(IntegrityError):
            checks[lane]()
    raw.fetch()
    for check in checks.values():
        check()
