"""The order of a fused weight's rows: reordered in place, and a rank's rows in few slices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flying_serving.layout.shards import Segment, segments_of
from flying_serving.weights.storage import StridedColumns
from flying_serving.weights.unit_order import UnitOrder, keep_by_unit
from harness.examples import examples
from tests.unit.memory.layers import DEGREES, Fused, by_unit, fused_layers, numbers, rows_of_rank

LLAMA_8B_QKV = segments_of([4096, 1024, 1024], 8, (32, 8, 8))
LLAMA_70B_QKV = segments_of([8192, 1024, 1024], 8, (64, 8, 8))
GATE_UP = segments_of([14336, 14336], 8)


@settings(max_examples=examples(120))
@given(layer=fused_layers(), scratch_bytes=st.sampled_from([1, 100, 1 << 20]))
def test_rows_are_the_loaded_ones_in_unit_order(layer: Fused, scratch_bytes: int) -> None:
    """For any scratch memory, down to one column at a time."""
    kept, rows = layer.weight.clone(), UnitOrder(layer.segments).loaded_rows()
    changed = keep_by_unit(kept, layer.segments, scratch_bytes)
    assert torch.equal(kept, torch.cat([layer.weight[part] for part in rows]))
    assert changed == (len(rows) > 1)


def test_two_units_of_q_k_v_are_kept_one_after_the_other() -> None:
    weight = torch.arange(8.0)[:, None]
    keep_by_unit(weight, (Segment(4, 2), Segment(2, 2), Segment(2, 2)))
    assert weight[:, 0].tolist() == [0, 1, 4, 6, 2, 3, 5, 7]


def test_a_slice_of_columns_is_reordered_in_place() -> None:
    """A weight whose rows do not lie one after the other."""
    whole = numbers(0, 8, 6)
    before, weight = whole.clone(), whole[:, 2:5]
    keep_by_unit(weight, (Segment(4, 4), Segment(4, 4)))
    assert torch.equal(weight, before[[0, 4, 1, 5, 2, 6, 3, 7], 2:5])
    assert torch.equal(whole[:, [0, 1, 5]], before[:, [0, 1, 5]])


def test_a_weight_without_data_is_left_alone() -> None:
    """As while a model is admitted: one number, seen in the shape of the weight."""
    weight = torch.ones(()).expand(8, 3)
    assert keep_by_unit(weight, (Segment(4, 2), Segment(4, 2)))
    assert torch.equal(weight, torch.ones(8, 3))


@pytest.mark.parametrize("segments", [LLAMA_8B_QKV, LLAMA_70B_QKV, GATE_UP])
@pytest.mark.parametrize("degree", DEGREES)
def test_a_rank_of_a_usual_layer_has_one_product(
    segments: tuple[Segment, ...], degree: int
) -> None:
    order = UnitOrder(segments)
    assert {len(order.rows_of(rank, degree).runs) for rank in range(degree)} == {1}


@pytest.mark.parametrize("segments", [LLAMA_8B_QKV, GATE_UP])
def test_a_rank_with_one_unit_needs_no_copy(segments: tuple[Segment, ...]) -> None:
    order = UnitOrder(segments)
    assert [order.rows_of(rank, 8).is_in_order for rank in range(8)] == [True] * 8
    assert [order.rows_of(rank, 4).is_in_order for rank in range(4)] == [False] * 4


def test_outputs_are_put_in_order_by_the_largest_equal_blocks() -> None:
    """Of a KV head's width; two units of four query heads, a key and a value each."""
    part = UnitOrder(LLAMA_8B_QKV).rows_of(1, 4)
    assert part.blocks() == (128, (0, 1, 2, 3, 6, 7, 8, 9, 4, 10, 5, 11))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("rank", range(4))
def test_ranks_that_share_kv_heads_have_at_most_two_products(kv_heads: int, rank: int) -> None:
    """Queries of the rank, and the keys and values that it shares."""
    order = UnitOrder(segments_of([32, 4 * kv_heads, 4 * kv_heads], 4, (8, kv_heads, kv_heads)))
    assert len(order.rows_of(rank, 4).runs) <= 2


def test_one_segment_keeps_its_order() -> None:
    """A layer that is not fused."""
    weight = numbers(0, 8, 3)
    before = weight.clone()
    assert not keep_by_unit(weight, (Segment(8, 4),))
    assert torch.equal(weight, before)
    assert UnitOrder((Segment(8, 4),)).rows_of(1, 2).is_in_order


@pytest.mark.parametrize("units", [3, 5, 6])
def test_numbers_of_units_that_are_no_powers_of_two_give_the_same_outputs(units: int) -> None:
    segments = (Segment(2 * units, units), Segment(units, units), Segment(3 * units, units))
    weight, bias, x = numbers(0, 6 * units, 4), numbers(1, 6 * units), numbers(2, 3, 4)
    storage, full = by_unit(weight, bias, segments), torch.nn.functional.linear(x, weight, bias)
    for degree in (1, units):
        for rank in range(degree):
            rows = rows_of_rank(segments, rank, degree)
            assert torch.equal(storage.part(rank, degree)(x), full[:, rows])


@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("bias", [None, numbers(5, 48)])
def test_outputs_by_unit_are_those_of_the_unit_alone(
    degree: int, bias: torch.Tensor | None
) -> None:
    """Gate and up of the first unit, then of the next one."""
    segments = (Segment(24, 8), Segment(24, 8))
    weight, x = numbers(0, 48, 4), numbers(1, 2, 4)
    storage, full = by_unit(weight, bias, segments), torch.nn.functional.linear(x, weight, bias)
    for rank in range(degree):
        out = storage.part_by_unit(rank, degree)(x).view(2, 8 // degree, 6)
        units = [
            full[:, rows_of_rank(segments, unit, 8)] for unit in segments[0].units_of(rank, degree)
        ]
        assert torch.equal(out, torch.stack(units, dim=1))


def test_outputs_by_unit_of_shared_units_raise() -> None:
    segments = segments_of([32, 4, 4], 4, (8, 1, 1))
    storage = StridedColumns(torch.zeros(40, 3), None, segments)
    with pytest.raises(ValueError, match="unpack"):
        storage.part_by_unit(0, 4)
