"""Shard arithmetic: ranks cut a weight without gap or overlap at every degree, and a KV block keeps
its bytes.
"""

import functools
import operator
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from flying_serving.errors import ConfigError
from flying_serving.layout.shards import Segment, degree_obstacle, lane_block_tokens, segments_of

SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Model:
    """A model's heads and a deployment for it."""

    attention_heads: int
    kv_heads: int
    head_size: int
    devices: int
    widest: int

    @property
    def local_kv_heads(self) -> int:
        """KV heads that one device of an engine holds, as vLLM counts them."""
        return max(1, self.kv_heads // self.devices)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Draw a model that can be split at every degree up to its deployment's widest."""
    devices, widest = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from(SIZES))
    kv_heads = draw(st.integers(1, 64))
    # a multiple of the degree, or nothing would be left of most examples
    kv_heads *= draw(st.sampled_from([1, devices, devices * widest]))
    step = devices * widest
    attention_heads = (
        step * kv_heads // draw(st.sampled_from([d for d in range(1, step + 1) if step % d == 0]))
    )
    attention_heads *= draw(st.integers(1, 4))
    degrees = [devices * size for size in SIZES if size <= widest]
    assume(all(degree_obstacle(degree, attention_heads, kv_heads) is None for degree in degrees))
    return Model(attention_heads, kv_heads, draw(st.sampled_from([2, 16])), devices, widest)


def rows_of(segment: Segment, rank: int, degree: int) -> list[int]:
    """Return the rows of a segment that a rank works on."""
    units = segment.units_of(rank, degree)
    return list(range(units.start * segment.unit_size, units.stop * segment.unit_size))


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), widest=st.sampled_from(SIZES))
def test_segment_without_heads_is_cut_into_equal_consecutive_parts(
    sizes: list[int], widest: int
) -> None:
    """At each degree the ranks' rows, one after the other, are the segment."""
    for size, segment in zip(
        sizes, segments_of([size * widest for size in sizes], widest), strict=True
    ):
        assert segment.size == size * widest
        for degree in [degree for degree in SIZES if degree <= widest]:
            parts = [rows_of(segment, rank, degree) for rank in range(degree)]
            assert functools.reduce(operator.iadd, parts, []) == list(range(segment.size))
            assert {len(part) for part in parts} == {segment.size // degree}


@given(models())
def test_heads_are_cut_or_replicate_evenly(model: Model) -> None:
    """Each row of q, k and v on exactly one rank, or, where heads are fewer than ranks, on equally
    many neighbours.
    """
    heads = (model.attention_heads // model.devices, model.local_kv_heads, model.local_kv_heads)
    sizes = [count * model.head_size for count in heads]
    for count, segment in zip(heads, segments_of(sizes, model.widest, heads), strict=True):
        for degree in [degree for degree in SIZES if degree <= model.widest]:
            parts = [rows_of(segment, rank, degree) for rank in range(degree)]
            copies = Counter(row for part in parts for row in part)
            assert copies == dict.fromkeys(range(segment.size), max(1, degree // count))
            assert parts == sorted(parts)
            for part in parts:
                assert len(part) == model.head_size * max(1, count // degree)
                assert part[0] % model.head_size == 0


@given(models())
def test_a_rank_is_its_two_halves_at_the_next_degree(model: Model) -> None:
    """So that lanes nest: rank r works on what ranks 2r and 2r + 1 of twice the degree work on."""
    heads = model.local_kv_heads
    (segment,) = segments_of([heads * model.head_size], model.widest, [heads])
    for degree in [degree for degree in SIZES if 2 * degree <= model.widest]:
        for rank in range(degree):
            halves = rows_of(segment, 2 * rank, 2 * degree) + rows_of(
                segment, 2 * rank + 1, 2 * degree
            )
            assert sorted(set(halves)) == rows_of(segment, rank, degree)


@given(models())
def test_kv_heads_fall_to_the_ranks_that_vllm_gives_them_to(model: Model) -> None:
    """Rank l*p + e of the group, part e of device l's shard, has the heads of vLLM's rank l*p + e
    of degree M*p.
    """
    heads = model.local_kv_heads
    (segment,) = segments_of([heads], model.widest, [heads])
    for size in [size for size in SIZES if size <= model.widest]:
        degree = model.devices * size
        for device in range(model.devices):
            # what vLLM loads to this device in lane 1
            first = device * model.kv_heads // model.devices
            for part in range(size):
                mine = [first + row for row in rows_of(segment, part, size)]
                rank = device * size + part
                if model.kv_heads >= degree:
                    each = model.kv_heads // degree
                    assert mine == list(range(rank * each, (rank + 1) * each))
                else:
                    assert mine == [rank // (degree // model.kv_heads)]


@given(models(), st.sampled_from([16, 32, 128]))
def test_a_block_keeps_its_bytes_in_every_lane(model: Model, block_tokens: int) -> None:
    """Tokens times heads on a device is the same in lane 1 and in a group: the paper's
    constant-byte block.
    """
    assert lane_block_tokens(block_tokens, 1, model.devices, model.kv_heads) == block_tokens
    for size in [size for size in SIZES if size <= model.widest]:
        heads = max(1, model.kv_heads // (model.devices * size))
        tokens = lane_block_tokens(block_tokens, size, model.devices, model.kv_heads)
        assert tokens * heads == block_tokens * model.local_kv_heads
        assert tokens == block_tokens * min(size, model.local_kv_heads)


def test_examples_of_the_design() -> None:
    """The numbers of known models: Llama 3 8B (32 heads, 8 KV heads) and one of a single KV
    head.
    """
    assert [lane_block_tokens(32, size, 1, 8) for size in SIZES] == [32, 64, 128, 256]
    assert [lane_block_tokens(32, size, 1, 1) for size in SIZES] == [32, 32, 32, 32]
    assert [lane_block_tokens(16, size, 4, 8) for size in (1, 2, 4)] == [16, 32, 32]
    q, k, v = segments_of([32 * 128, 8 * 128, 8 * 128], 4, [32, 8, 8])
    assert q.unit_size == 1024
    assert k.unit_size == 256
    assert v.unit_size == 256
    assert Segment(2 * 128, 2).units_of(3, 4) == range(1, 2)
    assert degree_obstacle(8, 32, 8) is None
    assert degree_obstacle(4, 30, 30) == "30 attention heads do not divide by 4"
    assert degree_obstacle(4, 12, 6) == "6 KV heads do not divide by 4"
    assert degree_obstacle(8, 24, 6) == "8 ranks do not share 6 KV heads evenly"


@given(degree=st.integers(1, 16), attention=st.integers(1, 64), kv=st.integers(1, 64))
def test_an_obstacle_is_what_vllm_asserts_against(degree: int, attention: int, kv: int) -> None:
    """QKVParallelLinear divides the heads, and the KV heads or the ranks among them."""
    vllm_can = attention % degree == 0 and (kv % degree == 0 if kv >= degree else degree % kv == 0)
    assert (degree_obstacle(degree, attention, kv) is None) == vllm_can


@pytest.mark.parametrize(("size", "units"), [(10, 4), (10, 0), (10, -2), (3, 8)])
def test_a_segment_that_cannot_be_cut_is_refused_with_both_numbers(size: int, units: int) -> None:
    with pytest.raises(ConfigError, match=f"segment of {size} cannot be cut into {units}"):
        Segment(size, units)
