"""Capacity: what a group of each size holds, in tokens."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.controller.group_choice import GroupChoice
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.settings import Capacity, Limits, Settings
from flying_serving.controller.state import ClusterState
from flying_serving.layout.groups import Layout
from flying_serving.policy.policies import POLICIES
from flying_serving.predict.work import Objective

SIZES = (1, 2, 4, 8)


def test_tokens_grow_with_the_group_until_heads_replicate() -> None:
    """101 blocks of 32 tokens, one of them vLLM's null block; two KV heads are cut once."""
    assert Capacity.of(SIZES, 101, 32, 1, 8).kv_tokens == {1: 3200, 2: 6400, 4: 12800, 8: 25600}
    assert Capacity.of(SIZES, 101, 32, 1, 2).kv_tokens == {1: 3200, 2: 6400, 4: 6400, 8: 6400}
    assert Capacity.of(SIZES, 101, 32, 1, 1).kv_tokens == dict.fromkeys(SIZES, 3200)
    assert Capacity.of((1, 2, 4), 101, 32, 2, 4).kv_tokens == {1: 3200, 2: 6400, 4: 6400}


def test_a_group_has_room_for_a_step_beside_its_tokens() -> None:
    """Not a group that holds the model's length: no step goes beyond it."""
    capacity = Capacity.of(SIZES, 101, 32, 1, 8).with_steps(6, 12_800)
    assert capacity.kv_tokens == {1: 3195, 2: 6395, 4: 12800, 8: 25600}
    assert capacity.step_tokens == 6


def test_a_group_that_holds_the_models_length_needs_no_more_room() -> None:
    capacity = Capacity.of((1, 2), 2, 4, 1, 8)
    assert capacity.with_steps(4, 100).kv_tokens == {1: 1, 2: 5}
    assert capacity.with_steps(6, 4).kv_tokens == {1: 4, 2: 8}


def test_degrees_count_devices() -> None:
    """A group of two engines with two devices each has degree four."""
    capacity = Capacity.of((4, 1, 2), 11, 32, 2, 8)
    assert [capacity.degree(size) for size in (1, 2, 4)] == [2, 4, 8]
    assert capacity.degrees == [2, 4, 8]


@given(
    tokens=st.dictionaries(st.sampled_from(SIZES), st.integers(0, 1000), min_size=1),
    needed=st.integers(0, 1100),
)
def test_fitting_sizes_hold_the_request_narrowest_first(
    tokens: dict[int, int], needed: int
) -> None:
    """Whatever each holds, exactly full included."""
    sizes = Capacity(tokens, 1).fitting_sizes(needed)
    assert sizes == sorted(sizes)
    assert set(sizes) == {size for size, holds in tokens.items() if holds >= needed}


@given(
    blocks=st.integers(2, 10_000),
    block_tokens=st.sampled_from([16, 32, 128]),
    kv_heads=st.sampled_from([1, 2, 4, 8, 32]),
    devices=st.sampled_from([1, 2, 4]),
)
def test_a_wider_group_never_holds_less(
    blocks: int, block_tokens: int, kv_heads: int, devices: int
) -> None:
    """Nor more than its engines' memory: twice the engines hold twice the tokens at most."""
    capacity = Capacity.of(SIZES, blocks, block_tokens, devices, kv_heads)
    for size in SIZES[:-1]:
        assert (
            capacity.kv_tokens[size] <= capacity.kv_tokens[2 * size] <= 2 * capacity.kv_tokens[size]
        )
    assert capacity.kv_tokens[1] == (blocks - 1) * block_tokens


def test_request_for_a_spare_size_is_refused() -> None:
    """Which a fixed layout has while an engine is lost; a request may have it all the same."""
    capacity = Capacity({1: 100, 4: 400}, 2, spare=frozenset({1}))
    assert capacity.degrees == [8]
    assert capacity.fitting_sizes(50) == [1, 4]


def test_a_request_with_a_state_takes_whole_blocks_beside_it() -> None:
    """Three states and a block of KV of 100 tokens, at most, for a request of 1 to 100 tokens."""
    capacity = Capacity({1: 100, 2: 200}, 1, {1: 100, 2: 200}, request_blocks=3)
    assert [capacity.request_tokens(size) for size in (1, 2)] == [300, 600]
    assert [capacity.in_blocks(1, tokens) for tokens in (0, 1, 100, 100.5)] == [0, 100, 100, 200]
    assert capacity.in_blocks(2, 101) == 200


@pytest.mark.parametrize("size", [1, 2])
def test_short_requests_have_as_much_room_as_their_states_leave(size: int) -> None:
    """Of 24 blocks six requests take three each for their states, and one each for their KV."""
    capacity = replace(Capacity.of((1, 2), 22, 100, 1, 4), request_blocks=3)
    settings = Settings(2, capacity, POLICIES["manual"], Limits(100, 1000), Objective(10.0))
    state = ClusterState(settings)
    choice, layout = GroupChoice(state), Layout.uniform(2, size)
    state.layout = layout
    group, placed = layout.groups[0], 0
    request = RequestState("0", RequestSpec(5, 5, degree=size), (size,), 0, 0.0)
    while choice.choose(request, Layout((group,)), {}, 10.0) == group:
        state.loads.add(request, group, choice.booked_tokens(request, group, 10.0))
        state.loads.add_tokens(request, 1)
        placed += 1
        request = RequestState(str(placed), RequestSpec(5, 5, degree=size), (size,), placed, 0.0)
    assert placed == 6


@given(tokens=st.floats(0, 1e6))
def test_without_a_state_a_request_takes_its_tokens(tokens: float) -> None:
    capacity = Capacity({1: 100}, 1, {1: 32})
    assert (capacity.request_tokens(1), capacity.in_blocks(1, tokens)) == (0, tokens)
