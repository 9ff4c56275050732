"""What a planner sees of a group: its prompts, and what decodes there or will."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flying_serving.controller.loads import Loads
from flying_serving.controller.requests import RequestSpec, RequestState
from flying_serving.controller.splits import Split, Splits, virtual_batch
from flying_serving.layout.groups import KVSource, Layout
from flying_serving.policy.split import VirtualBatch

FIRST, SECOND = (0,), (1,)


def request(name: str, prompt: int, outputs: int) -> RequestState:
    """Return a request that waits."""
    return RequestState(name, RequestSpec(prompt, prompt + outputs, outputs), (1,), 1, 0.0)


def split(at: int) -> tuple[Loads, RequestState, Split]:
    """A request of 40 and 20 tokens, split there."""
    loads, one = Loads(), request("a", 40, 20)
    return loads, one, Splits(loads).begin(one, at, KVSource(FIRST, 1), SECOND, 60.0)


def test_empty_group_has_an_empty_virtual_batch() -> None:
    assert virtual_batch(Loads()[FIRST]) == VirtualBatch()


def test_prompts_and_streams_of_a_group() -> None:
    """A request whose prompt waits will decode there; one that has had more than was expected gets
    one more token.
    """
    loads = Loads()
    states = [request("prompt", 30, 10), request("stream", 20, 10), request("long", 10, 90)]
    for state, expected in zip(states, (40.0, 30.0, 20.0), strict=True):
        loads.add(state, FIRST, expected)
    loads.add_tokens(states[1], 4)
    loads.add_tokens(states[2], 25)
    mean_context, mean_left = (30 + 24 + 35) / 3, (10 + 6 + 1) / 3
    assert virtual_batch(loads[FIRST]) == VirtualBatch(30, 3, mean_context, mean_left, 30 * 15)


@pytest.mark.parametrize(
    ("at", "first", "second"),
    [
        (16, VirtualBatch(16, 0, 0.0, 0.0, 16 * 8), VirtualBatch(24, 1, 40.0, 20.0, 24 * 28)),
        (40, VirtualBatch(40, 0, 0.0, 0.0, 40 * 20), VirtualBatch(1, 1, 40.0, 20.0, 39.5)),
        (50, VirtualBatch(40, 1, 40.0, 11.0, 40 * 20), VirtualBatch(1, 1, 50.0, 10.0, 49.5)),
    ],
)
def test_both_groups_of_a_split_request_have_their_part(
    at: int, first: VirtualBatch, second: VirtualBatch
) -> None:
    """A prefix, or a first token, is a prompt and no stream."""
    loads, _, _ = split(at)
    assert virtual_batch(loads[FIRST]) == first
    assert virtual_batch(loads[SECOND]) == second


@given(at=st.integers(1, 58))
def test_ending_a_split_takes_its_part_from_the_books_once(at: int) -> None:
    """The request itself stays where it is."""
    loads, one, made = split(at)
    splits = Splits(loads, open={"a": made})
    group = one.group
    assert {group, made.part_group} == {FIRST, SECOND}
    assert splits.end("a", undone=True) is made
    assert splits.end("a") is None
    assert loads.groups == [group]
    assert list(loads[group or ()].requests) == ["a"]
    assert splits.counts.undone == 1
    assert len(splits) == 0


def test_a_layout_has_both_groups_of_a_split_or_not() -> None:
    loads, _, made = split(16)
    splits = Splits(loads, open={"a": made})
    assert splits.without(Layout.uniform(2, 1)) == []
    assert splits.without(Layout.uniform(2, 2)) == ["a"]


def test_a_planner_may_leave_out_a_request_that_a_group_has() -> None:
    loads = Loads()
    states = [request("one", 30, 10), request("two", 20, 10)]
    for state in states:
        loads.add(state, FIRST, 40.0)
    both = virtual_batch(loads[FIRST])
    loads.add(request("three", 50, 10), FIRST, 60.0)
    assert virtual_batch(loads[FIRST], "three") == both
    assert virtual_batch(loads[FIRST], "none of them") == virtual_batch(loads[FIRST])
